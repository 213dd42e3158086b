"""Three hundred JSON schemas of rising difficulty: some written by hand, most generated, all fixed.

Bounds keep texts short, so that a random model completes a good share of them. `REFUSED`: schemas
that are not fully supported, by the unsupported keyword.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

COUNT = 300
NAMES = ("name", "true", "id", "items", "x y", "é", "a.b", "$k", "deep/er", 'quo"te', "", "n\n")
WORDS = ("ab", "name", "true", "", "été", 'a"b', "x\\y", "tab\t", "0", "日本")
PATTERNS = (
    "^[ab]{1,3}$", "^(name|true)$", "[0-9]", "^a?b*$", r"^\d{2}-\d{2}$", "^x", "y$", "^[^a-z]{2}$",
)  # fmt: skip
FORMATS = ("date", "time", "uuid", "ipv4", "email", "duration", "date-time", "hostname")


def schemas() -> list[Schema]:
    """Return the hand-written schemas, then the generated ones by rising depth."""
    rng = random.Random(20261120)
    missing = COUNT - len(WRITTEN)
    generated = [_object(rng, 1 + 3 * i // missing) for i in range(missing)]
    return WRITTEN + [
        _shared(schema) if i % 4 == 3 else schema for i, schema in enumerate(generated)
    ]


def _shared(schema: Schema) -> Schema:
    """Return the schema with its properties moved to definitions and referenced."""
    parts: Schema = schema["properties"]
    names = {name: f"d{i}" for i, name in enumerate(parts)}
    references = {name: {"$ref": f"#/$defs/{names[name]}"} for name in parts}
    definitions = {names[name]: part for name, part in parts.items()}
    return {**schema, "properties": references, "$defs": definitions}


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [
        _string, _integer, _number, _plain, _enum, _const,
    ]  # fmt: skip
    if depth > 0:
        kinds += [_object, _object, _array, _tuple, _any_of, _nullable, _merged]
    return rng.choice(kinds)(rng, depth)


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 6}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(4)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-300, 300)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if rng.random() < 0.3:
        schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 30}
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice((2, 3, 5, 7))
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.choice((-1.5, 0, 0.25, 3, 99.5))
    if rng.random() < 0.5:
        high = low + rng.choice((0.75, 7, 120.5))
        return {"type": "number", "exclusiveMinimum": low - 0.25, "maximum": high}
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.choice((1, 7, 20.5))}


def _enum(rng: random.Random, depth: int) -> Schema:
    values = [*WORDS, 1, -2.5, True, None, [1, "ab"], {"a": None}]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice([*WORDS, 0, False, {"name": [1, 2]}, []])}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    rest = rng.choice((False, {"type": "boolean"}))
    return {"type": "array", "prefixItems": parts, "items": rest, "maxItems": len(parts) + 1}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^p[0-9]$": {"type": "boolean"}}
    if rng.random() < 0.3:
        schema |= {"title": "T", "description": "of the thing", "examples": [{}]}
    return schema


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _nullable(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"anyOf": [_any(rng, depth - 1), {"type": "null"}]}
    return {"type": ["string", "null", "boolean"], "maxLength": 3}


def _merged(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 50)
    return {
        "allOf": [
            {"type": "integer", "minimum": low},
            {"maximum": low + 60},
            {"anyOf": [{"multipleOf": 2}, {"multipleOf": 5}]},
        ]
    }


_TREE: Schema = {
    "type": "object",
    "properties": {
        "v": {"enum": [1, 2]},
        "l": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
        "r": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
    },
    "required": ["v", "l", "r"],
    "additionalProperties": False,
}
_LIST: Schema = {
    "type": "object",
    "properties": {"head": {"type": "boolean"}, "tail": {"$ref": "#"}},
    "required": ["head"],
    "additionalProperties": False,
}
_EXPRESSION: Schema = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": "array", "prefixItems": [{"enum": ["+", "*"]}, {"$ref": "#/$defs/e"},
         {"$ref": "#/$defs/e"}], "items": False, "minItems": 3},
    ]
}  # fmt: skip
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"

WRITTEN: list[Schema] = [
    {"type": "object"},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [True, None, {"b": 1.5}], "": ""}},
    {"enum": ["yes", "no", 3, None]},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^(ab|name)+$", "maxLength": 12},
    {"type": "string", "pattern": "b{2}", "maxLength": 5},
    {"type": "string", "pattern": '^["\\\\]{1,2}$'},
    {"type": "string", "enum": ["\n", "\t\u0007", "\u007f", "</script>", "\U0001f600"]},
    {"type": "integer", "minimum": -3, "maximum": 3},
    {"type": "integer", "exclusiveMinimum": 9, "maximum": 1000},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 500},
    {"type": ["integer", "null"], "minimum": 5, "maximum": 6},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {"type": "array", "items": {}, "maxItems": 0},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False},
    {"$schema": _DRAFT_7, "type": "array", "items": [{"const": 1}], "additionalItems": False},
    {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "array", "maxItems": 1,
     "items": {"enum": [[], {}]}}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}},
    _LIST,
    {"$ref": "#/$defs/e", "$defs": {"e": _EXPRESSION}},
    {"$ref": "#/definitions/a", "definitions": {"a": {"anyOf": [{"const": 1},
     {"$ref": "#/definitions/b"}]}, "b": {"type": "array", "maxItems": 1,
     "items": {"$ref": "#/definitions/a"}}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"enum": [7]}},
     "required": ["a", "b"], "additionalProperties": False},
    {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer", "maximum": 9}}},
    {"type": "object", "patternProperties": {"^a{1,3}$": {"const": 1}},
     "additionalProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "minProperties": 2,
     "maxProperties": 2, "additionalProperties": {"const": 2}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "required": ["z"], "additionalProperties": {"const": 0},
     "maxProperties": 2},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}},
    {"anyOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "n": {"const": 1}},
     "required": ["kind", "n"], "additionalProperties": False},
     {"type": "object", "properties": {"kind": {"const": "b"}, "s": {"const": "x"}},
     "required": ["kind", "s"], "additionalProperties": False}]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"],
     "additionalProperties": False}, {"type": "object", "properties": {"k": {"const": "b"}},
     "required": ["k"], "additionalProperties": False}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
     {"properties": {"a": {"minimum": 3, "maximum": 4}}, "additionalProperties": False}]},
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    {"type": "object", "properties": {f"p{i}": {"const": i} for i in range(12)},
     "required": [f"p{i}" for i in range(0, 12, 3)], "additionalProperties": False},
    {"enum": [f"value {i}" for i in range(500)]},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uri"},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"},
     "id": {"type": "string", "format": "uuid"}}, "required": ["when", "id"],
     "additionalProperties": False},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/s",
     "$comment": "c", "title": "t", "default": {}, "type": "object", "deprecated": True,
     "readOnly": True, "additionalProperties": False},
]  # fmt: skip
for _deep in range(2, 8):
    _nest: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
    for _ in range(_deep):
        _nest = {"type": "object", "properties": {"in": _nest}, "required": ["in"],
                 "additionalProperties": False}  # fmt: skip
    WRITTEN.append(_nest)

REFUSED: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "minContains": {"type": "array", "minContains": 1},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "propertyNames": {"propertyNames": {"pattern": "^x"}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "nullable": {"properties": {"a": {"type": "string", "nullable": True}}},
    "contentSchema": {"type": "string", "contentSchema": {"type": "object"}},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "x-guidance": {"x-guidance": {"lenient": True}, "uniqueItems": True},
    "misspelt": {"type": "string", "maxlength": 3},
    "format": {"type": "string", "format": "color-by-name"},
    "minProperties": {"type": "object", "minProperties": 3},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 2}]},
    "pattern": {"type": "string", "pattern": "(?=a)b"},
    "multipleOf": {"type": "integer", "multipleOf": 0},
    "required": {"type": "object", "required": ["z"], "additionalProperties": False},
    "range": {"type": "integer", "minimum": 3, "maximum": 2},
    "slipping": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    "slipping up": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
    "slipping together": {"allOf": [{"type": "number", "exclusiveMinimum": 1}, {"maximum": 1.5}]},
    "remote": {"$ref": "https://example.com/schema.json"},
    "dangling": {"$ref": "#/$defs/nowhere"},
    "endless": {"$ref": "#"},
    "infinite": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"],
                 "additionalProperties": False},
    "list": {"type": "object", "properties": []},
}  # fmt: skip
