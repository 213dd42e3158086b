"""Request body of /v1/responses, and the chat request that it becomes.

Fields that mean the same for chat are handed on unread; the others are read here and said in chat's
words. Whatever chat then refuses is told in the words of this endpoint (`renames`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.errors import ApiError, invalid, unsupported
from server.api.explain import check_names, explain, must_be, shown
from server.api.fields import ROWS
from server.api.fields_responses import ENCRYPTED, LOGPROBS, NO_REASONING, REASONING_REFUSED
from server.api.limits import MAX_TOOLS
from server.api.renames import Renames
from server.api.responses_input import conversation
from server.api.schema import Length, Part
from server.api.schema_chat import ChatRequest


def _include(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(item in (LOGPROBS, ENCRYPTED) for item in value):
        raise must_be("include", value, "responses")
    return tuple(value)


class TextConfig(Part):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(Part):
    """What asks for a summary or for a way of thinking is refused, not left undone."""

    effort: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_more(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in REASONING_REFUSED:
            if value.get(name) is not None:
                path = f"reasoning.{name}"
                said = f"`{path}` is not supported by this server: it {NO_REASONING}"
                raise unsupported(path, said)
        return {name: value[name] for name in value if name not in REASONING_REFUSED}


class StreamOptions(Part):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Part):
    """The fields that chat does not have under the same name and shape."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Length | None = None
    include: Annotated[tuple[str, ...], BeforeValidator(_include)] = ()
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    tools: list[Any] = []
    tool_choice: Any = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] = "disabled"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and LOGPROBS not in self.include:
            raise invalid(
                "top_logprobs", f'`top_logprobs` is only allowed with `include`: ["{LOGPROBS}"]'
            )
        return self


@dataclass(frozen=True, slots=True)
class Translated:
    """`chat` does the work, `asked` is what the response repeats, `renames` tells its errors."""

    chat: ChatRequest
    asked: ResponsesRequest
    renames: Renames


def translate(data: dict[str, Any]) -> Translated:
    """Raises ApiError, always a 400."""
    given = {name: value for name, value in data.items() if value is not None}
    kept = check_names(given, "responses")
    chat_rows, rows = ROWS["chat"], ROWS["responses"]
    shared = {name: value for name, value in kept.items() if chat_rows.get(name) is rows[name]}
    own = {name: value for name, value in kept.items() if name not in shared}
    try:
        asked = ResponsesRequest.model_validate(own)
    except ValidationError as error:
        raise explain(error, "responses") from None
    if asked.stream_options is not None and shared.get("stream") is not True:
        raise invalid("stream_options", "`stream_options` is only allowed with `stream`: true")
    told = conversation(asked.input, asked.instructions)
    tools, paths = _tools(asked.tools)
    longest = {"messages": "instructions"} if told.is_mostly_instructions else {}
    renames = Renames({**PATHS, **paths, **told.paths}, too_long=longest)
    inner = {**shared, "messages": told.messages, **_limits(asked), **_text(asked), **tools}
    if asked.tool_choice is not None:
        inner["tool_choice"] = _tool_choice(asked.tool_choice)
    with renames.applied():
        try:
            return Translated(
                ChatRequest.model_validate(check_names(inner, "chat")), asked, renames
            )
        except ValidationError as error:
            raise explain(error, "chat") from None


PATHS = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}


def _limits(asked: ResponsesRequest) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if asked.max_output_tokens is not None:
        told["max_completion_tokens"] = asked.max_output_tokens
    if LOGPROBS in asked.include:
        told |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    return told


def _text(asked: ResponsesRequest) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if asked.reasoning.effort is not None:
        told["reasoning_effort"] = asked.reasoning.effort
    if asked.text.verbosity is not None:
        told["verbosity"] = asked.text.verbosity
    match asked.text.format:
        case None:
            pass
        case {"type": "json_schema", **schema}:
            told["response_format"] = {"type": "json_schema", "json_schema": schema}
        case other:
            told["response_format"] = other
    return told


def _tools(tools: list[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Chat's `tools`, and where the parts of each stand here."""
    if not tools:
        return {}, {}
    if len(tools) > MAX_TOOLS:
        raise must_be("tools", tools, "responses")
    inner = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise invalid(
                f"tools[{i}]", f"`tools[{i}]` must be an object, but {shown(tool)} was given"
            )
        if tool.get("type") != "function":
            path = f"tools[{i}].type"
            code = "unsupported_field" if isinstance(tool.get("type"), str) else "invalid_value"
            message = f'`{path}` must be "function": this server hosts no tools'
            raise ApiError(400, message, param=path, code=code)
        function = {name: value for name, value in tool.items() if name != "type"}
        inner.append({"type": "function", "function": function})
    return {"tools": inner}, {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", **function}:
            return {"type": "function", "function": function}
        case {"type": "allowed_tools", "tools": [*tools], **rest}:
            inner = [_tool_choice(tool) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {**rest, "tools": inner}}
        case {"type": "allowed_tools", **rest}:
            return {"type": "allowed_tools", "allowed_tools": rest}
        case "none" | "auto" | "required":
            return choice
        case {"type": str()}:
            said = '`tool_choice.type` must be "function" or "allowed_tools"'
            raise unsupported("tool_choice.type", said)
        case _:
            raise must_be("tool_choice", choice, "responses")
