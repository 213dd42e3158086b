"""The fields that constrain the text, each read into one Grammar: OpenAI's `response_format`, and
vLLM's `structured_outputs` with its older spelling (`guided_json` and so on).

Only the shape is checked here; intake asks `generation.structured` whether a grammar can be
enforced. Schemas are enforced with or without `strict`; unsupported parts are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from engine.messages import Grammar, GrammarKind
from server.api.body import parse_json
from server.api.errors import ApiError
from server.api.limits import MAX_CHOICES, MAX_SCHEMA_NAME
from server.api.messages import Description
from server.api.request import AnyObject, RequestObject, Source, Unsupported, fault


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the path of the request field that asks for it (`param`)."""

    grammar: Grammar
    param: str

    @property
    def field(self) -> str:
        return self.param.partition(".")[0]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _schema(value: AnyObject) -> AnyObject:
    try:
        _json(value)
    except ValueError:
        raise fault("", "holds a number that JSON does not have") from None
    return value


def _schema_or_its_text(value: AnyObject | str) -> AnyObject:
    """Accept a schema as an object or as its JSON text, as vLLM does."""
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except ApiError as error:
            text = error.message.removeprefix("the body").removeprefix(f"`{error.param}`").strip()
            raise fault(error.param or "", text, str(error.code)) from None
    return _schema(value)


Schema = Annotated[AnyObject, AfterValidator(_schema)]
SchemaOrText = Annotated[AnyObject | str, AfterValidator(_schema_or_its_text)]
Choices = Annotated[list[Source], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class FreeFormat(RequestObject):
    type: Literal["text", "json_object"]

    @property
    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        return Constraint(Grammar("json_object"), "response_format")


class JsonSchema(RequestObject):
    name: Annotated[str, Field(pattern=f"^[A-Za-z0-9_-]{{1,{MAX_SCHEMA_NAME}}}$")]
    schema_: Schema = Field(alias="schema")
    description: Description | None = None
    strict: bool | None = None


class SchemaFormat(RequestObject):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def constraint(self) -> Constraint:
        grammar = Grammar("json_schema", _json(self.json_schema.schema_))
        return Constraint(grammar, "response_format.json_schema.schema")


ResponseFormat = Annotated[FreeFormat | SchemaFormat, Field(discriminator="type")]


# Grammar kinds by attribute of StructuredOutputs.
KINDS: Mapping[str, GrammarKind] = {
    "json_": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
}


def _constraint(name: str, value: Any, param: str) -> Constraint:
    source = "" if value is True else value if isinstance(value, str) else _json(value)
    return Constraint(Grammar(KINDS[name], source), param)


class StructuredOutputs(RequestObject):
    """Exactly one of the first five fields must be set."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    json_: SchemaOrText | None = Field(None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: Literal[True] | None = None
    disable_fallback: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None
    structural_tag: Unsupported = None

    @property
    def given(self) -> dict[str, Any]:
        """Return the constraints that are set, by attribute."""
        found = {name: getattr(self, name) for name in KINDS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def constraint(self) -> Constraint:
        [(name, value)] = self.given.items()
        return _constraint(name, value, f"structured_outputs.{name.rstrip('_')}")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.given) != 1:
            names = "`json`, `regex`, `choice`, `grammar`, `json_object`"
            raise fault("", f"must hold exactly one of {names}; {len(self.given)} were given")
        return self


def guided(request: Any) -> list[Constraint]:
    """Return the constraints of the request's fields `guided_json`, `guided_regex` and so on."""
    fields = {name: f"guided_{name.rstrip('_')}" for name in KINDS}
    given = {name: getattr(request, field, None) for name, field in fields.items()}
    return [_constraint(name, it, fields[name]) for name, it in given.items() if it is not None]
