"""Which JSON schemas are accepted: the keywords that are enforced, and those that only annotate.

llguidance ignores keywords that it does not know; here they are refused by name, so that no schema
is half-applied. llguidance defines the meaning of the enforced keywords, and refuses combinations
that it cannot enforce. No torch, no llguidance.
"""

from __future__ import annotations

import math
from typing import Any

VALUES = frozenset({
    "type", "enum", "const", "required", "pattern", "format", "minLength", "maxLength", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems",
    "minProperties", "maxProperties", "$ref", "$anchor",
})  # fmt: skip
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems"})
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$id", "contentEncoding", "contentMediaType", "discriminator",
})  # fmt: skip
MAX_DEPTH = 64
MAX_DIGITS = 15  # of a decimal fraction, so that a double preserves it


class SchemaRefused(ValueError):
    """The schema is malformed or cannot be enforced completely; the message is one sentence."""


def check_schema(schema: Any) -> None:
    """Raises SchemaRefused unless the whole schema can be enforced."""
    if not isinstance(schema, dict):
        raise SchemaRefused("a schema must be a JSON object")
    found: list[dict[str, Any]] = []
    _check(schema, "", 0, found)
    _check_bounds(found)


def _check(schema: Any, path: str, depth: int, found: list[dict[str, Any]]) -> None:
    """Check a schema and all schemas in it, and append them to `found`."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaRefused(f"the schema at `{path}` must be an object, true or false")
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"the schema is nested more than {MAX_DEPTH} levels deep")
    _check_values(schema, path)
    found.append(schema)
    for name, value in schema.items():
        for key, part in _parts(name, value, f"{path}.{name}" if path else name):
            _check(part, key, depth + 1, found)


def _parts(name: str, value: Any, where: str) -> list[tuple[str, Any]]:
    """Return the schemas inside one keyword, with their paths."""
    if name in MAPS:
        if not isinstance(value, dict):
            raise SchemaRefused(f"`{where}` must be an object of schemas")
        return [(f"{where}.{key[:64]}", part) for key, part in value.items()]
    if name in LISTS or (name == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise SchemaRefused(f"`{where}` must be a list of schemas")
        return [(f"{where}[{i}]", part) for i, part in enumerate(value)]
    if name in SCHEMAS:
        return [(where, value)]
    if name not in VALUES and name not in ANNOTATIONS:
        known = "nothing here enforces it, and a schema is never half-applied"
        raise SchemaRefused(f"the keyword `{where[:200]}` is not supported: {known}")
    return []


def _check_values(schema: dict[str, Any], path: str) -> None:
    """Raises SchemaRefused for values that llguidance reads differently from the standard."""
    where = f" at `{path[:200]}`" if path else ""
    step = schema.get("multipleOf", 1)
    if isinstance(step, int | float) and step <= 0:
        raise SchemaRefused(f"`multipleOf`{where} must be above 0, but {step} was given")
    for name in (*_LOW, *_HIGH, "multipleOf", "const", "enum"):
        _check_numbers(schema.get(name), f"`{name}`{where}")
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    named = len({*map(str, required)}) if isinstance(required, list) else 0
    # Further properties may repeat a name, and llguidance would count each repetition.
    if isinstance(least, int) and least > named + 1:
        raise SchemaRefused(
            f"`minProperties`{where} is {least}, but only {named} are required; more than one"
            " property that is not named in `required` cannot be enforced"
        )


def _check_numbers(value: Any, what: str) -> None:
    """Raises SchemaRefused for numbers that llguidance would round: it has doubles and int64."""
    many = isinstance(value, dict | list)
    for part in value.values() if isinstance(value, dict) else value if many else ():
        _check_numbers(part, what)
    if many or isinstance(value, bool) or not isinstance(value, int | float):
        return
    exact = value == int(value) if math.isfinite(value) else False
    digits = repr(abs(value)).split("e")[0].replace(".", "").strip("0")
    if abs(value) > 2**53 if exact else len(digits) > MAX_DIGITS:
        raise SchemaRefused(
            f"{what} has a number that cannot be enforced exactly: at most {MAX_DIGITS} digits, or"
            " an integer from -2**53 to 2**53"
        )


def _check_bounds(schemas: list[dict[str, Any]]) -> None:
    """Raises SchemaRefused for an excluded integer with a fractional other bound less than 1 away,
    since llguidance lets that integer through; also if references or unions may combine them."""
    bounds = [
        {
            (name, float(schema[name]))
            for name in (*_LOW, *_HIGH)
            if type(schema.get(name)) in (int, float) and abs(schema[name]) < 1e300
        }
        for schema in schemas
    ]
    limits = {*_LOW, *_HIGH}
    if any(
        "allOf" in each or (limits & each.keys() and {"$ref", "anyOf", "oneOf"} & each.keys())
        for each in schemas
    ):
        bounds.append(set().union(*bounds))
    if any(map(_is_unenforceable, bounds)):
        raise SchemaRefused(
            "`exclusiveMinimum` or `exclusiveMaximum` is a whole number and the other bound a"
            " fraction less than 1 away; that cannot be enforced, but a fraction beside the whole"
            " number can"
        )


_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def _is_unenforceable(bounds: set[tuple[str, float]]) -> bool:
    floors = {("exclusiveMinimum", math.floor(x)) for name, x in bounds if name in _HIGH and x % 1}
    ceilings = {("exclusiveMaximum", math.ceil(x)) for name, x in bounds if name in _LOW and x % 1}
    return bool((floors | ceilings) & bounds)
