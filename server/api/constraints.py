"""The two fields that constrain text, each read into one Grammar: OpenAI's `response_format`, and
vLLM's `structured_outputs`.

Shape only: whether the grammar can be honoured is asked of `generation.structured` in intake.
A schema is enforced whether `strict` is said or not; what is not enforced is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.messages import Grammar
from server.api.body import AnyObject, Part, Text, duplicate_key, given_twice, num_values
from server.api.errors import invalid, only, unsupported
from server.api.explain import wrong
from server.api.limits import MAX_CHOICES, MAX_DESCRIPTION, MAX_SCHEMA_NAME, MAX_VALUES
from server.api.tools import Description

_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_SCHEMA_NAME}}}")
REFUSED_OUTPUTS = (
    "disable_fallback", "disable_any_whitespace", "disable_additional_properties",
    "whitespace_pattern", "structural_tag",
)  # fmt: skip


Source = Annotated[Text, Field(min_length=1)]
SchemaName = Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]


class FreeFormat(Part):
    type: Literal["text", "json_object"]


class JsonSchema(Part):
    name: SchemaName
    schema_: AnyObject = Field(alias="schema")
    description: Description | None = None
    strict: bool | None = None


class SchemaFormat(Part):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ByJson(Part):
    json_: AnyObject | Text = Field(alias="json")


class ByRegex(Part):
    regex: Source


class ByChoice(Part):
    choice: Annotated[list[Source], Field(min_length=1, max_length=MAX_CHOICES)]


class ByGrammar(Part):
    grammar: Source


class ByJsonObject(Part):
    json_object: Literal[True]


StructuredBody = ByJson | ByRegex | ByChoice | ByGrammar | ByJsonObject


@dataclass(frozen=True, slots=True)
class Constraint:
    """`param`: the path of the field that the grammar came from."""

    grammar: Grammar
    param: str


def as_response_format(value: Any) -> Constraint | None:
    """None: text without bounds."""
    given = _object(value, "response_format")
    kind = given.get("type")
    if kind == "json_schema":
        only(given, {"type", "json_schema"}, "response_format")
        return _json_schema(given.get("json_schema"))
    if kind not in ("text", "json_object"):
        allowed = '"text", "json_object" or "json_schema"'
        raise invalid("response_format.type", f"`response_format.type` must be {allowed}")
    only(given, {"type"}, "response_format")
    return Constraint(Grammar("json_object"), "response_format") if kind != "text" else None


def as_structured_outputs(value: Any) -> Constraint:
    path = "structured_outputs"
    given = _object(value, path)
    for name in REFUSED_OUTPUTS:
        where = f"{path}.{name}"
        if given.pop(name, False):
            message = f"`{where}` is not supported by this server; it must be left out"
            raise unsupported(where, message)
    only(given, _OUTPUTS, path)
    if len(given) != 1:
        names = ", ".join(f"`{name}`" for name in _OUTPUTS)
        raise invalid(path, f"`{path}` must hold exactly one of {names}; {len(given)} were given")
    [(name, said)] = given.items()
    return Constraint(_OUTPUTS[name](said, f"{path}.{name}"), f"{path}.{name}")


def _json_schema(value: Any) -> Constraint:
    path = "response_format.json_schema"
    given = _object(value, path)
    only(given, {"name", "description", "schema", "strict"}, path)
    name, description = given.get("name"), given.get("description", "")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        allowed = f"1 to {MAX_SCHEMA_NAME} letters, digits, underscores and dashes"
        raise invalid(f"{path}.name", f"`{path}.name` must be {allowed}")
    if not (isinstance(description, str) and len(description) <= MAX_DESCRIPTION):
        allowed = f"a string of at most {MAX_DESCRIPTION} characters"
        raise invalid(f"{path}.description", f"`{path}.description` must be {allowed}")
    if not isinstance(given.get("strict", True), bool):
        raise invalid(f"{path}.strict", f"`{path}.strict` must be true or false")
    return Constraint(_schema(given.get("schema"), f"{path}.schema"), f"{path}.schema")


def _schema(value: Any, path: str) -> Grammar:
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise invalid(path, f"`{path}` holds a number that JSON does not have") from None
    return Grammar("json_schema", _text(text, path))


def _json(value: Any, path: str) -> Grammar:
    """A schema, or its text, as vLLM takes it."""
    if isinstance(value, str):
        text = value.encode()
        if num_values(text) > MAX_VALUES:
            raise invalid(path, f"`{path}` holds more than {MAX_VALUES} JSON values")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(path, f"`{path}` is no valid JSON") from None
        twice = duplicate_key(text, value) if isinstance(value, dict) else None
        if twice is not None:
            raise given_twice(f"{path}.{twice}")
    return _schema(value, path)


def _regex(value: Any, path: str) -> Grammar:
    return Grammar("regex", _text(value, path))


def _lark(value: Any, path: str) -> Grammar:
    return Grammar("lark", _text(value, path))


def _choice(value: Any, path: str) -> Grammar:
    if not (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_CHOICES
        and all(isinstance(choice, str) and choice for choice in value)
    ):
        raise wrong(path, f"a list of 1 to {MAX_CHOICES} strings, none of them empty", value)
    return Grammar("choice", _text(json.dumps(value, ensure_ascii=False), path))


def _any_object(value: Any, path: str) -> Grammar:
    if value is not True:
        raise invalid(path, f"`{path}` must be true or left out")
    return Grammar("json_object")


_OUTPUTS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
    "json_object": _any_object,
}


def _object(value: Any, path: str) -> dict[str, Any]:
    """Without the nulls, which say the same as leaving them out."""
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    return {name: said for name, said in value.items() if said is not None}


def _text(value: Any, path: str) -> str:
    if not (isinstance(value, str) and value):
        raise wrong(path, "a string", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid(path, f"`{path}` holds half of a surrogate pair") from None
    return value
