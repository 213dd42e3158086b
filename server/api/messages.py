"""Chat messages and tools, as clients send them and as the chat template receives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from server.api.body import num_values
from server.api.errors import invalid
from server.api.limits import MAX_CALLS, MAX_DESCRIPTION, MAX_TOOL_BYTES, MAX_TOOLS, MAX_VALUES
from server.api.request import AnyObject, Label, RequestObject, Unsupported, fault

MAX_ARGUMENT_DEPTH = 64
FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Description = Annotated[str, Field(max_length=MAX_DESCRIPTION)]
NO_PARAMETERS: AnyObject = {"type": "object", "properties": {}}


class CacheControl(RequestObject):
    """A hint without effect: every prompt is cached as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextPart(RequestObject):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Unsupported = None


class RefusalPart(RequestObject):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(RequestObject):
    name: FunctionName
    arguments: str
    parsed_arguments: Any = None  # added by the SDK's `parse`; clients send it back


class Call(RequestObject):
    type: Literal["function"]
    id: Annotated[Label, Field(min_length=1)]
    function: CalledFunction
    index: Any = None


class Message(RequestObject):
    """A chat message. An assistant's `refusal` replaces its content. Its reasoning, under either
    name, is for chat templates that read it. The last five fields belong to the SDKs' message
    objects, which clients send back; they add no information."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)] | None = None
    name: Label | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: CacheControl | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] = []
    tool_call_id: Label | None = None
    parsed: Any = None
    annotations: Any = None
    provider_specific_fields: Any = None
    function_call: Unsupported = None
    audio: Unsupported = None

    @property
    def text(self) -> str:
        """Return the content, with parts joined by line breaks, or else the refusal."""
        if isinstance(self.content, list):
            return "\n".join(
                part.text if isinstance(part, TextPart) else part.refusal for part in self.content
            )
        return self.content or self.refusal or ""

    @property
    def thoughts(self) -> str:
        return self.reasoning or self.reasoning_content or ""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Check which fields each role may have and must have."""
        for member in ("refusal", "tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, member) and self.role != "assistant":
                raise fault(member, "is only allowed in messages of the role assistant")
        if self.reasoning and self.reasoning_content not in (None, self.reasoning):
            raise fault("reasoning", "and `reasoning_content` are aliases, but differ")
        if self.tool_call_id and self.role != "tool":
            raise fault("tool_call_id", "is only allowed in messages of the role tool")
        if self.refusal and self.content:
            raise fault("refusal", "is only allowed without a content")
        if self.content is None and not (self.refusal or self.tool_calls or self.thoughts):
            raise fault("content", "is required: a string or a list of text parts", "missing_field")
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if part.type == "refusal" and self.role != "assistant":
                raise fault(f"content[{i}].type", 'must be "text"', "unsupported_field")
        if len({call.id for call in self.tool_calls}) < len(self.tool_calls):
            raise fault("tool_calls", ": two of the calls have the same id")
        if self.role == "tool" and self.tool_call_id is None:
            problem = "is required: the id of the call that this message answers"
            raise fault("tool_call_id", problem, "missing_field")
        return self


def as_template_sees(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates read: contents as one string, the role
    developer as system, and arguments as an object if they are one in JSON. Each run of tool
    results is put in the order of its calls, since templates match them by position, and each
    result gets the name of its function.

    Raises ApiError for a result whose call was not made just before or is already answered, and for
    arguments with more JSON values than a body may hold.
    """
    texts = [call.function.arguments for message in messages for call in message.tool_calls]
    if sum(num_values(text.encode()) for text in texts) > MAX_VALUES:
        problem = f": the arguments of its calls hold more than {MAX_VALUES} JSON values"
        raise invalid("messages", problem)
    seen: list[dict[str, Any]] = []
    begin, names, answered = 0, dict[str, str](), set[str]()  # for the latest run of tool results
    for i, message in enumerate(messages):
        if message.role != "tool":
            seen.append(_turn(message))
            begin, answered = len(seen), set()
            names = {call.id: call.function.name for call in message.tool_calls}
            continue
        id, where = message.tool_call_id or "", f"messages[{i}].tool_call_id"
        if id not in names:
            problem = "must be the id of a call that the assistant made just before"
            raise invalid(where, problem)
        if id in answered:
            raise invalid(where, ": that call is answered already")
        answered.add(id)
        seen.append({"name": names[id], **_turn(message), "tool_call_id": id})
        order = list(names)
        seen[begin:] = sorted(seen[begin:], key=lambda turn: order.index(turn["tool_call_id"]))
    return seen


def _turn(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if message.thoughts:  # templates differ in which of these names they read
        turn |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), message.thoughts)
    for call in message.tool_calls:
        function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        shown = {"id": call.id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(shown)
    return turn


def _arguments(text: str) -> dict[str, Any] | str:
    """Return a JSON object parsed, other text unchanged so that a model can see its mistake."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and _is_plain(value, 0) else text


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a template can write the value: no lone surrogates, no excessive nesting."""
    match value:
        case str():
            return value.isascii() or value.encode("utf-8", "ignore").decode() == value
        case dict() | list():
            parts = value if isinstance(value, list) else (*value, *value.values())
            return depth < MAX_ARGUMENT_DEPTH and all(_is_plain(part, depth + 1) for part in parts)
    return True


def as_parameters(value: AnyObject) -> AnyObject:
    if value.get("type", "object") != "object":
        raise fault("type", 'must be "object"')
    try:
        size = len(json.dumps(value, allow_nan=False))
    except ValueError:
        raise fault("", "must be JSON, which has no NaN and no Infinity") from None
    if size > MAX_TOOL_BYTES:
        raise fault("", f"must be at most {MAX_TOOL_BYTES} bytes of JSON")
    return value


class ToolFunction(RequestObject):
    """A function. `strict`: a grammar holds the arguments to `parameters`, a JSON schema."""

    name: FunctionName
    description: Description | None = None
    parameters: Annotated[AnyObject, AfterValidator(as_parameters)] | None = None
    strict: bool = False


class Tool(RequestObject):
    type: Literal["function"]
    function: ToolFunction
    cache_control: CacheControl | None = None

    def as_template_sees(self) -> dict[str, Any]:
        """Return the tool as an object, with the keys in the order that transformers uses."""
        given = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        parameters = self.function.parameters
        function = {**given, "parameters": NO_PARAMETERS if parameters is None else parameters}
        return {"type": "function", "function": function}


class FunctionReference(RequestObject):
    name: FunctionName


class NamedTool(RequestObject):
    type: Literal["function"]
    function: FunctionReference


class AllowedTools(RequestObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(RequestObject):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoiceBody = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools may be called. `names`: only these (`path` is the field that lists them); None:
    all that are offered. `single`: one named function, called once."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    path: str = "tool_choice"
    single: bool = False


def tool_choice(given: ToolChoiceBody | None) -> ToolChoice:
    match given:
        case NamedTool():
            name = given.function.name
            return ToolChoice("required", (name,), "tool_choice.function.name", single=True)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = tuple(tool.function.name for tool in allowed.tools)
            return ToolChoice(allowed.mode, names, "tool_choice.allowed_tools.tools")
        case _:
            return ToolChoice(given or "auto")


def check_tools(tools: list[Tool], given: ToolChoiceBody | None) -> None:
    """Check `tools` and `tool_choice` against each other. Raises ApiError."""
    choice = tool_choice(given)
    if not tools and choice.mode == "required":
        raise invalid("tool_choice", "is only allowed with `tools`")
    offered: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in offered:
            problem = f": another tool has the name {tool.function.name} already"
            raise invalid(f"tools[{i}].function.name", problem)
        offered.add(tool.function.name)
    for name in choice.names or ():
        if name not in offered:
            raise invalid(choice.path, f": no tool of the name {name} is in `tools`")
