"""One field of a request: how a model declares and describes it.

The declaration is the only source: requests are checked against it, error messages quote its row,
docs/api.md, /v1/capabilities and /openapi.json are generated from it, and tests check each row. A
field that no model of the endpoint declares is unknown and refused by name.

A row may depend on the settings: `unless` says why the present ones refuse the field. The same
predicate refuses the field in requests and reports it in /v1/capabilities.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from server.api.services import Services
from server.text.tool_format import tool_format

Status = Literal["supported", "no-op", "refused"]
Unless = Callable[[Services], str | None]
Refused = SkipJsonSchema[None]  # the type of a refused field
Schema = dict[str, Any]
EFFORT_READ_AS = ("reasoning_effort", "enable_thinking")  # chat template variables


@dataclass(frozen=True, slots=True)
class FieldRow:
    """The description of a field. `allowed` completes the sentence "`name` must be ..."; if it is
    empty or begins with a comma, the words for the schema come first. `neutral`: values of a
    refused field that mean the same as leaving it out (null always does). `unless` returns the
    reason, a clause, why these settings refuse the field, or None."""

    kind: Status
    meaning: str
    allowed: str = ""
    neutral: tuple[object, ...] = ()
    unless: Unless | None = None

    def is_neutral(self, value: object) -> bool:
        """Whether this value means the same as leaving the field out."""
        return value is None or any(
            type(value) is type(same) and value == same for same in self.neutral
        )

    def all_allowed(self, schema: Schema) -> str:
        is_whole = self.allowed and not self.allowed.startswith(",")
        return self.allowed if is_whole else in_words(schema) + self.allowed

    def __call__(self, schema: Schema) -> None:
        """Complete the JSON schema when pydantic calls this: add the description, and allow null
        for a field that may be left out."""
        about = f"{self.meaning} Must be {self.all_allowed(schema)}."
        if "default" in schema:
            del schema["default"]  # hidden: clients that send all defaults should send nulls
            members = schema["anyOf"] if schema.keys() == {"anyOf"} else [dict(schema)]
            null = [] if {"type": "null"} in members else [{"type": "null"}]
            schema.clear()
            schema |= {"anyOf": [*members, *null], "default": None, "description": about}
        else:
            schema["description"] = about


def described(
    default: Any,
    meaning: str,
    allowed: str = "",
    *,
    no_op: bool = False,
    neutral: tuple[object, ...] = (),
    unless: Unless | None = None,
    **bounds: Any,
) -> Any:
    """Declare a field that is accepted; `no_op`: without effect. `bounds` are pydantic's."""
    row = FieldRow("no-op" if no_op else "supported", meaning, allowed, neutral, unless)
    return Field(default, json_schema_extra=row, **bounds)


def refused(meaning: str, *neutral: object) -> Any:
    """Declare a field that is known but not supported; `neutral` values of it are ignored."""
    allowed = " or ".join(["left out", *map(json.dumps, neutral)])
    return Field(None, json_schema_extra=FieldRow("refused", meaning, allowed, neutral))


def in_words(schema: Schema) -> str:
    """Return in words what the schema of a simple value allows."""
    match schema:
        case {"anyOf": [inner, {"type": "null"}]}:
            return in_words(inner)
        case {"const": value}:
            return json.dumps(value)
        case {"enum": [*others, last]}:
            return f"{', '.join(map(json.dumps, others))} or {json.dumps(last)}"
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "string", "maxLength": most}:
            return f"a string of at most {most} characters"
        case {"type": "string"}:
            return "a string that is not empty" if "minLength" in schema else "a string"
        case {"type": kind, "minimum": least, "maximum": most}:
            return f"{'an' if kind == 'integer' else 'a'} {kind} from {least} to {most}"
        case {"type": kind, "exclusiveMinimum": least, "maximum": most}:
            return f"a {kind} above {least} and up to {most}"
    raise TypeError(f"say in words what {schema} admits")


def _unless(holds: Callable[[Services], bool], reason: str) -> Unless:
    return lambda services: None if holds(services) else reason


no_chat_template = _unless(
    lambda services: services.tokenizer.has_chat_template,
    "this model has no chat template; use /v1/completions with a plain prompt",
)
no_fill_in = _unless(
    lambda services: services.tokenizer.fill_in is not None,
    "the vocabulary of this model has no tokens for fill-in-the-middle",
)
no_effort = _unless(
    lambda services: any(map(services.tokenizer.template_reads, EFFORT_READ_AS)),
    "this model's chat template reads neither reasoning_effort nor enable_thinking",
)
no_priority = _unless(
    lambda services: services.keyring.may_prioritise,
    "no request may set it (`server.allow_priority`, or `priority` of a key)",
)


def no_variables(services: Services) -> str | None:
    allowed = services.config.server.chat_template_kwargs
    if any(map(services.tokenizer.template_reads, allowed)):
        return None
    return (
        "this model's chat template reads none of the variables that requests may set"
        f" ({', '.join(allowed) or 'none'})"
    )


def no_tools(services: Services) -> str | None:
    found = tool_format(services.tokenizer, services.config.server.tool_parser)
    return found if isinstance(found, str) else None
