"""The messages of a chat: as clients send them, and as the chat template gets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from server.api.body import num_values
from server.api.errors import invalid
from server.api.limits import MAX_CALLS, MAX_VALUES
from server.api.request import Absent, Label, Part, Text, fault
from server.api.tools import FunctionName

MAX_ARGUMENT_DEPTH = 64


class TextPart(Part):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Absent = None


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: Text


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Part):
    name: FunctionName
    arguments: Text
    parsed_arguments: Any = None  # added by the SDK's `parse`, whose calls come back as they are


class Call(Part):
    type: Literal["function"]
    id: Annotated[Label, Field(min_length=1)]
    function: CalledFunction
    index: Any = None


class Message(Part):
    """What the assistant refused to say stands instead of its content. The last five members are
    those of the SDKs' own message objects, when they are sent back; they say nothing new."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)] | None = None
    name: Label | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] = []
    tool_call_id: Label | None = None
    parsed: Any = None
    annotations: Any = None
    provider_specific_fields: Any = None
    function_call: Absent = None
    audio: Absent = None

    @property
    def text(self) -> str:
        """Parts are joined by line breaks."""
        if isinstance(self.content, list):
            return "\n".join(
                part.text if isinstance(part, TextPart) else part.refusal for part in self.content
            )
        return self.content or self.refusal or ""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Which role may have what, and what it must have."""
        assistants = {"refusal": self.refusal, "tool_calls": self.tool_calls}
        for member, given in assistants.items():
            if given and self.role != "assistant":
                raise _only(member, "in messages of the role assistant")
        if self.tool_call_id and self.role != "tool":
            raise _only("tool_call_id", "in messages of the role tool")
        if self.refusal and self.content:
            raise _only("refusal", "without a content")
        if self.content is None and not (self.refusal or self.tool_calls):
            said = "`{path}` is required: a string or a list of text parts"
            raise fault("content", said, code="missing_field")
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if part.type == "refusal" and self.role != "assistant":
                raise fault(f"content[{i}].type", '`{path}` must be "text"', "unsupported_field")
        if len({call.id for call in self.tool_calls}) < len(self.tool_calls):
            raise fault("tool_calls", "`{path}`: two of the calls have the same id")
        if self.role == "tool" and self.tool_call_id is None:
            said = "`{path}` is required: the id of the call that this message answers"
            raise fault("tool_call_id", said, code="missing_field")
        return self


def _only(member: str, where: str) -> Exception:
    return fault(member, f"`{{path}}` is only allowed {where}")


def as_template_sees(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Contents are one string, developers are system, arguments that are a JSON object are one, and
    each run of results is in the order of the calls that it answers, since templates tell results
    apart by their place alone; a result also has the name of its function.

    Raises ApiError for a result of a call that was not made just before, or answered already, and
    for too many values in arguments, each of which counts as one value of the body.
    """
    texts = [call.function.arguments for message in messages for call in message.tool_calls]
    if sum(num_values(text.encode()) for text in texts) > MAX_VALUES:
        said = f"the arguments of the calls in `messages` hold more than {MAX_VALUES} JSON values"
        raise invalid("messages", said)
    seen: list[dict[str, Any]] = []
    begin, names, answered = 0, dict[str, str](), set[str]()  # of the last run of results
    for i, message in enumerate(messages):
        if message.role != "tool":
            seen.append(_turn(message))
            begin, answered = len(seen), set()
            names = {call.id: call.function.name for call in message.tool_calls}
            continue
        id, where = message.tool_call_id or "", f"messages[{i}].tool_call_id"
        if id not in names:
            said = "must be the id of one of the `tool_calls` of the assistant's message before"
            raise invalid(where, f"`{where}` {said}")
        if id in answered:
            raise invalid(where, f"`{where}`: that call is answered already")
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
    for call in message.tool_calls:
        function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        shown = {"id": call.id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(shown)
    return turn


def _arguments(text: str) -> dict[str, Any] | str:
    """A JSON object as one; any other text as it is, so that a model can be shown its mistake."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and _is_plain(value, 0) else text


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a template can write it: no half of a surrogate pair, no endless nesting."""
    match value:
        case str():
            return value.isascii() or value.encode("utf-8", "ignore").decode() == value
        case dict() | list():
            parts = value if isinstance(value, list) else (*value, *value.values())
            return depth < MAX_ARGUMENT_DEPTH and all(_is_plain(part, depth + 1) for part in parts)
    return True
