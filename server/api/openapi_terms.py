"""Words of JSON Schema (2020-12), as OpenAPI 3.1 takes them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
TEXT: Schema = {**STRING, "pattern": "^[^\\x00]*$"}  # a request's: NUL is no text
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKEN_ID: Schema = {"$ref": "#/components/schemas/TokenId"}


def string(longest: int | None = None, *, shortest: int = 0) -> Schema:
    bounds = {"minLength": shortest} if shortest else {}
    return {**TEXT, **bounds, **({} if longest is None else {"maxLength": longest})}


def integer(low: int, high: int) -> Schema:
    return {**INTEGER, "minimum": low, "maximum": high}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def array(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    bounds = {"minItems": least} if least else {}
    most_ = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, **bounds, **most_}


def mapping(values: Schema, *, most: int, names: Schema | None = None) -> Schema:
    told = {"type": "object", "additionalProperties": values, "maxProperties": most}
    return told if names is None else {**told, "propertyNames": names}


def closed(required: Schema, **optional: Schema) -> Schema:
    """An object with these members and no others."""
    return {**record(required, **optional), "additionalProperties": False}


def record(required: Schema, **optional: Schema) -> Schema:
    """An object with these members at least."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    return any_of(schema, NULL)
