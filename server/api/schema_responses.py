"""Request body of /v1/responses, and the chat request that it becomes.

Fields that mean the same for chat are handed on unread; the others are read here and said in chat's
words. Whatever chat then refuses is told in the words of this endpoint (`Renames`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.body import AnyObject, Part, Text
from server.api.constraints import FreeFormat, JsonSchema
from server.api.errors import (
    ApiError,
    ContextLengthExceeded,
    as_api_error,
    invalid,
    missing,
    unknown_field,
    unsupported,
)
from server.api.explain import explain, must_be, shown, wrong
from server.api.fields import ENCRYPTED, LOGPROBS, NO_REASONING, REASONING_REFUSED
from server.api.limits import MAX_LABEL_LENGTH, MAX_MESSAGES, MAX_TOOLS
from server.api.messages import Label
from server.api.schema import Length, RequestBody, split
from server.api.schema_chat import ChatRequest
from server.api.tools import FunctionBody, FunctionName
from server.errors import ChatTemplateError, GenerationFailed, GrammarRefused

QUOTED = re.compile(r"`([a-z_]+[\w.\[\]]*)`")


class Renames:
    """`paths`: field paths of the chat request and their names in the outer request; the longest
    prefix that fits decides. `too_long`: names used only in the error of a context that is full."""

    def __init__(self, paths: Mapping[str, str], too_long: Mapping[str, str] | None = None) -> None:
        self._paths = sorted(paths.items(), key=lambda pair: -len(pair[0]))
        self._too_long = too_long or {}

    def path(self, inner: str) -> str:
        for old, new in self._paths:
            if inner == old or inner.startswith((f"{old}.", f"{old}[")):
                return new + inner[len(old) :]
        return inner

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Errors of callers leave renamed; all others as they are."""
        try:
            yield
        except GenerationFailed as error:
            if error.param is not None:
                error.param = self.path(error.param)
            raise
        except ContextLengthExceeded as error:
            full = Renames({**dict(self._paths), **self._too_long})
            raise full._renamed(as_api_error(error)) from None
        except (ApiError, ChatTemplateError, GrammarRefused) as error:
            raise self._renamed(as_api_error(error)) from None

    def _renamed(self, error: ApiError) -> ApiError:
        message = QUOTED.sub(lambda found: f"`{self.path(found[1])}`", error.message)
        param = None if error.param is None else self.path(error.param)
        return ApiError(error.status, message, param=param, code=error.code)


ROLES = ("user", "system", "developer", "assistant")
STATUSES = ("in_progress", "completed", "incomplete")
PARTS = {"input_text": {"type", "text"}, "output_text": {"type", "text", "logprobs"}}


@dataclass
class Conversation:
    """`messages` as /v1/chat/completions takes them; `paths`: where each part of them stands in the
    request that was sent."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=lambda: {"messages": "input"})
    called: set[str] = field(default_factory=set)  # ids of the calls so far

    @property
    def is_mostly_instructions(self) -> bool:
        """Whether these alone are longer than all else."""
        if self.paths.get("messages[0]") != "instructions":
            return False
        length = len(self.messages[0]["content"])
        for message in self.messages[1:]:
            content = message.get("content", "")
            parts = [content] if isinstance(content, str) else [part["text"] for part in content]
            length -= sum(map(len, parts))
        return length > 0

    def add(self, message: dict[str, Any], path: str, **parts: str) -> None:
        """`parts`: members of the message that are called something else at `path`."""
        inner = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.paths[inner] = path
        for name, outer in parts.items():
            self.paths[f"{inner}.{name}"] = outer


def conversation(items: Any, instructions: str | None) -> Conversation:
    """Raises ApiError for what cannot be said to a chat model."""
    told = Conversation()
    if instructions is not None:
        said = {"role": "system", "content": instructions}
        told.add(said, "instructions", content="instructions")
    if isinstance(items, str):
        told.add({"role": "user", "content": items}, "input", content="input")
        return told
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_MESSAGES:
        raise must_be("input", items, "responses")
    for i, item in enumerate(items):
        _add(told, item, f"input[{i}]")
    return told


def _add(told: Conversation, item: Any, path: str) -> None:
    if not isinstance(item, dict):
        raise wrong(path, "an object", item)
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.get("type", "message" if "role" in given else None)
    match kind:
        case "message":
            _message(told, given, path)
        case "function_call":
            _call(told, given, path)
        case "function_call_output":
            _output(told, given, path)
        case None:
            raise missing(f"{path}.type", "message, function_call or function_call_output")
        case _:
            said = "must be message, function_call or function_call_output"
            code = "unsupported_field" if isinstance(kind, str) else "invalid_value"
            why = ": no reasoning items are made or taken" if kind == "reasoning" else ""
            raise ApiError(400, f"`{path}.type` {said}{why}", param=f"{path}.type", code=code)


def _message(told: Conversation, given: dict[str, Any], path: str) -> None:
    _check_names(given, path, {"type", "role", "content", "id", "status"})
    if given.get("role") not in ROLES:
        raise invalid(f"{path}.role", f"`{path}.role` must be one of {', '.join(ROLES)}")
    if "content" not in given:
        raise missing(f"{path}.content", "a string or a list of text parts")
    content = _content(given["content"], f"{path}.content")
    told.add({"role": given["role"], "content": content}, path)


def _call(told: Conversation, given: dict[str, Any], path: str) -> None:
    """Calls in a row, and the assistant's text before them, are one message."""
    _check_names(given, path, {"type", "call_id", "name", "arguments", "id", "status"})
    for name in ("call_id", "name", "arguments"):
        if name not in given:
            raise missing(f"{path}.{name}", "a string")
    if not told.messages or told.messages[-1]["role"] != "assistant":
        told.add({"role": "assistant"}, path)
    calls = told.messages[-1].setdefault("tool_calls", [])
    inner = f"messages[{len(told.messages) - 1}].tool_calls[{len(calls)}]"
    told.paths |= {inner: path, f"{inner}.function": path, f"{inner}.id": f"{path}.call_id"}
    function = {"name": given["name"], "arguments": given["arguments"]}
    calls.append({"id": given["call_id"], "type": "function", "function": function})
    if isinstance(given["call_id"], str):
        told.called.add(given["call_id"])


def _output(told: Conversation, given: dict[str, Any], path: str) -> None:
    _check_names(given, path, {"type", "call_id", "output", "id", "status"})
    for name, allowed in (("call_id", "a string"), ("output", "a string or a list of text parts")):
        if name not in given:
            raise missing(f"{path}.{name}", allowed)
    where = f"{path}.call_id"
    if not isinstance(given["call_id"], str) or given["call_id"] not in told.called:
        raise invalid(where, f"`{where}` must be the call_id of a function_call item before it")
    output = _content(given["output"], f"{path}.output")
    message = {"role": "tool", "tool_call_id": given["call_id"], "content": output}
    told.add(message, path, tool_call_id=where, content=f"{path}.output")


def _content(value: Any, path: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong(path, "a string or a list of at least one text part", value)
    return [_plain(part) or _part(part, f"{path}[{i}]") for i, part in enumerate(value)]


def _plain(part: Any) -> dict[str, str] | None:
    """The usual part, read quickly: there may be very many."""
    if type(part) is dict and len(part) == 2 and part.get("type") in ("input_text", "output_text"):
        text = part.get("text")
        return {"type": "text", "text": text} if isinstance(text, str) else None
    return None


def _part(part: Any, path: str) -> dict[str, str]:
    shape = '{"type": "input_text" or "output_text", "text": a string}'
    if not isinstance(part, dict):
        raise wrong(path, shape, part)
    kind, where = part.get("type"), f"{path}.type"
    names = PARTS.get(kind) if isinstance(kind, str) else None
    if names is None:
        said = 'must be "input_text" or "output_text": no images, audio, files or refusals'
        code = "unsupported_field" if isinstance(kind, str) else "invalid_value"
        raise ApiError(400, f"`{where}` {said}", param=where, code=code)
    given = {name: value for name, value in part.items() if value not in (None, [])}
    _check_names(given, path, names)
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong(f"{path}.text", "a string", text)
    return {"type": "text", "text": text}


def _check_names(given: dict[str, Any], path: str, names: set[str]) -> None:
    for name, value in given.items():
        where = f"{path}.{name[:64]}"
        if name not in names:
            raise unknown_field(where)
        if name == "status" and value not in STATUSES:
            raise invalid(where, f"`{where}` must be one of {', '.join(STATUSES)}")
        if name == "id" and not (isinstance(value, str) and len(value) <= MAX_LABEL_LENGTH):
            raise wrong(where, f"a string of at most {MAX_LABEL_LENGTH} characters", value)


def _include(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(item in (LOGPROBS, ENCRYPTED) for item in value):
        raise must_be("include", value, "responses")
    return tuple(value)


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class FlatTool(FunctionBody):
    type: Literal["function"]


class FlatNamedTool(Part):
    type: Literal["function"]
    name: FunctionName


class FlatAllowedTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class InputPart(Part):
    type: Literal["input_text", "output_text"]
    text: Text
    logprobs: list[AnyObject] = []


class Item(Part):
    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


ItemText = Text | Annotated[list[InputPart], Field(min_length=1)]


class InputMessage(Item):
    role: Literal["user", "system", "developer", "assistant"]
    content: ItemText
    type: Literal["message"] = "message"


class InputCall(Item):
    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: Text


class InputCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: ItemText


InputBody = (
    Text
    | Annotated[
        list[InputMessage | InputCall | InputCallOutput],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
)


def as_sent(value: Any) -> Any:
    """Read by `read`, once the fields beside it are known."""
    return value


class TextConfig(Part):
    format: Annotated[
        AnyObject | None,
        BeforeValidator(as_sent, json_schema_input_type=FreeFormat | FlatSchemaFormat | None),
    ] = None
    verbosity: str | None = None


class Reasoning(Part):
    """What asks for a summary or for a way of thinking is refused, not left undone."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None
    context: None = None
    mode: None = None

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
        return value


class ResponsesStreamOptions(Part):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(RequestBody):
    """The fields that chat does not have under the same name and shape; they are what the response
    repeats. `chat` does the work, `renames` tells its errors."""

    endpoint = "responses"
    base = ChatRequest

    input: Annotated[Any, BeforeValidator(as_sent, json_schema_input_type=InputBody)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    include: Annotated[
        tuple[str, ...],
        BeforeValidator(
            _include,
            json_schema_input_type=list[
                Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
            ],
        ),
    ] = ()
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    tools: Annotated[
        list[Any],
        BeforeValidator(
            as_sent,
            json_schema_input_type=Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)],
        ),
    ] = []
    tool_choice: Annotated[
        Any,
        BeforeValidator(
            as_sent,
            json_schema_input_type=Literal["none", "auto", "required"]
            | FlatNamedTool
            | FlatAllowedTools,
        ),
    ] = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    _chat: ChatRequest = PrivateAttr()
    _renames: Renames = PrivateAttr()

    @property
    def chat(self) -> ChatRequest:
        return self._chat

    @property
    def renames(self) -> Renames:
        return self._renames

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        own, shared = split(data, "responses")
        try:
            asked = cls.model_validate(own)
        except ValidationError as error:
            raise explain(error, "responses") from None
        if asked.stream_options is not None and shared.get("stream") is not True:
            raise invalid("stream_options", "`stream_options` is only allowed with `stream`: true")
        told = conversation(asked.input, asked.instructions)
        tools, paths = _tools(asked.tools)
        longest = {"messages": "instructions"} if told.is_mostly_instructions else {}
        asked._renames = Renames({**PATHS, **paths, **told.paths}, too_long=longest)
        inner = {**shared, "messages": told.messages, **_limits(asked), **_text(asked), **tools}
        if asked.tool_choice is not None:
            inner["tool_choice"] = _tool_choice(asked.tool_choice)
        with asked._renames.applied():
            asked._chat = ChatRequest.read(inner)
        return asked

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and LOGPROBS not in self.include:
            raise invalid(
                "top_logprobs", f'`top_logprobs` is only allowed with `include`: ["{LOGPROBS}"]'
            )
        return self


class InputTokensRequest(ResponsesRequest):
    """Here `model` may be left out."""

    _names_model: bool = PrivateAttr(True)

    @property
    def names_model(self) -> bool:
        return self._names_model

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        request = super().read({"model": "", **data})
        request._names_model = "model" in data
        return request


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
