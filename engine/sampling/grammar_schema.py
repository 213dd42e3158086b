"""Which JSON schemas are honoured: every keyword that is enforced, and those that only annotate.

llguidance passes over keywords that it does not know; here they are refused by name, so that no
schema is half-applied. What each enforced keyword means is llguidance's to say, and it refuses
those combinations that it cannot honour. No torch, no llguidance.
"""

from __future__ import annotations

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


class SchemaRefused(ValueError):
    """A schema that is malformed or asks for more than is enforced; one sentence."""


def check_schema(schema: Any) -> None:
    """Raises SchemaRefused."""
    if not isinstance(schema, dict):
        raise SchemaRefused("a schema must be a JSON object")
    _check(schema, "", 0)


def _check(schema: Any, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaRefused(f"the schema at `{path}` must be an object, true or false")
    if depth > MAX_DEPTH:
        raise SchemaRefused(f"the schema is nested more than {MAX_DEPTH} levels deep")
    _check_values(schema, path)
    for name, value in schema.items():
        for key, part in _parts(name, value, f"{path}.{name}" if path else name):
            _check(part, key, depth + 1)


def _parts(name: str, value: Any, where: str) -> list[tuple[str, Any]]:
    """The schemas inside one keyword, with their paths."""
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
    """What llguidance reads differently from the standard."""
    where = f" at `{path[:200]}`" if path else ""
    step = schema.get("multipleOf", 1)
    if isinstance(step, int | float) and step <= 0:
        raise SchemaRefused(f"`multipleOf`{where} must be above 0, but {step} was given")
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    named = len(required) if isinstance(required, list) else 0
    # Further names may repeat each other, and would be counted as often.
    if isinstance(least, int) and least > named + 1:
        raise SchemaRefused(
            f"`minProperties`{where} is {least}, but only {named} are required; more than one"
            " property that is not named in `required` cannot be enforced"
        )
