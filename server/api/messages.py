"""The messages of a chat: from what clients send to what the chat template gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from server.api.body import Part, Text, num_values
from server.api.errors import ApiError, invalid, missing, only, unknown_field, unsupported
from server.api.explain import shown, wrong
from server.api.limits import MAX_CALLS, MAX_LABEL_LENGTH, MAX_MESSAGES, MAX_VALUES
from server.api.tools import FunctionName, checked, function_name

_HINT = "prompt_cache_breakpoint"


Label = Annotated[Text, Field(max_length=MAX_LABEL_LENGTH)]


class TextPart(Part):
    type: Literal["text"]
    text: Text


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: Text


TextBody = Text | Annotated[list[TextPart], Field(min_length=1)]
SaidBody = Text | Annotated[list[TextPart | RefusalPart], Field(min_length=1)]


class CalledFunction(Part):
    name: FunctionName
    arguments: Text


class CallBody(Part):
    id: Annotated[Label, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction


CallsBody = Annotated[list[CallBody], Field(max_length=MAX_CALLS)]


class UserMessage(Part):
    role: Literal["system", "developer", "user"]
    content: TextBody
    name: Label | None = None


class AssistantMessage(Part):
    role: Literal["assistant"]
    content: SaidBody
    name: Label | None = None
    tool_calls: CallsBody = []


class AssistantRefusal(Part):
    role: Literal["assistant"]
    refusal: Text
    content: None = None
    name: Label = ""


class AssistantCalls(Part):
    role: Literal["assistant"]
    tool_calls: Annotated[CallsBody, Field(min_length=1)]
    content: SaidBody | None = None


class ToolMessage(Part):
    role: Literal["tool"]
    content: TextBody
    tool_call_id: Label
    name: Label | None = None


MessagesBody = Annotated[
    list[UserMessage | AssistantMessage | AssistantRefusal | AssistantCalls | ToolMessage],
    Field(min_length=1, max_length=MAX_MESSAGES),
]


def text_of(part: dict[str, Any], path: str, kind: str = "text") -> str:
    """Of {"type": "text", "text": a string}, or of another kind of that shape; its type was looked
    at. Nulls are as good as left out. Raises ApiError."""
    given = {name: value for name, value in part.items() if value is not None}
    if _HINT in given:
        where = f"{path}.{_HINT}"
        message = f"`{where}` is not supported by this server (Cache control); it must be left out"
        raise unsupported(where, message)
    only(given, ("type", kind), path)
    if kind not in given:
        raise missing(f"{path}.{kind}", "a string")
    text = given[kind]
    if not isinstance(text, str):
        where = f"{path}.{kind}"
        raise wrong(where, "a string", text)
    return text


ECHOED_CALL = {
    "parsed_arguments"
}  # what the SDK's `parse` adds to calls, which come back as they are
MAX_ARGUMENT_DEPTH = 64


def as_tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    """An assistant's calls, their arguments still a text (`read_arguments`)."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CALLS:
        raise wrong(path, f"a list of 1 to {MAX_CALLS} calls", value)
    calls = [_call(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if len({call["id"] for call in calls}) < len(calls):
        raise invalid(path, f"`{path}`: two of the calls have the same id")
    return calls


def _call(item: Any, path: str) -> dict[str, Any]:
    call = checked(item, path, {"id", "type", "function", "index"}, kind="function")
    if "id" not in call:
        raise missing(f"{path}.id", f"a string of 1 to {MAX_LABEL_LENGTH} characters")
    id = call["id"]
    if not isinstance(id, str) or not 1 <= len(id) <= MAX_LABEL_LENGTH:
        allowed = f"a string of 1 to {MAX_LABEL_LENGTH} characters"
        raise invalid(f"{path}.id", f"`{path}.id` must be {allowed}")
    where = f"{path}.function"
    if "function" not in call:
        raise missing(where, "an object with name and arguments")
    function = checked(call["function"], where, {"name", "arguments", *ECHOED_CALL}, kind=None)
    name = function_name(function, where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        said = f"`{where}.arguments` must be a string with a JSON object in it"
        raise invalid(f"{where}.arguments", f"{said}, but {shown(arguments)} was given")
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def read_arguments(messages: Sequence[dict[str, Any]]) -> None:
    """Arguments that are a JSON object become one, as the templates of transformers expect; any
    other text stays the string it is, so that a broken call can be told to the model. Counted
    first, since what texts hold is not part of the count of the body. Raises ApiError."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    if sum(num_values(call["arguments"].encode()) for call in calls) > MAX_VALUES:
        said = f"the arguments of the calls in `messages` hold more than {MAX_VALUES} JSON values"
        raise invalid("messages", said)
    for call in calls:
        call["arguments"] = _arguments(call["arguments"])


def _arguments(text: str) -> dict[str, Any] | str:
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


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run of results in the order of the calls that it answers, since templates tell results
    apart by their place alone; a result also gets the name of its function.

    Raises ApiError for a result of a call that was not made just before, or answered already.
    """
    ordered: list[dict[str, Any]] = []
    calls: dict[str, tuple[int, str]] = {}
    begin = 0
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            begin, calls = i + 1, {}
            for place, call in enumerate(message.get("tool_calls") or ()):
                calls[call["id"]] = (place, call["function"]["name"])
            ordered.append(message)
            continue
        path, id = f"messages[{i}].tool_call_id", message.get("tool_call_id")
        if id is None:
            raise missing(path, "the id of the call that this message answers")
        if id not in calls:
            raise _no_such_call(path)
        place, name = calls[id]
        if any(other["tool_call_id"] == id for other in ordered[begin:]):
            raise invalid(path, f"`{path}`: that call is answered already")
        before = [m for m in ordered[begin:] if calls[m["tool_call_id"]][0] < place]
        ordered.insert(begin + len(before), {"name": name, **message})
    return ordered


def _no_such_call(path: str) -> ApiError:
    return invalid(
        path,
        f"`{path}` must be the id of one of the `tool_calls` of the assistant's message before",
    )


ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = {"role", "content", "name", "refusal", "tool_calls", "tool_call_id"}
ROLE_OF_FIELD = {"refusal": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}
# What the SDKs' own message objects carry when they are sent back; it says nothing new.
ECHOED = {"parsed", "annotations", "provider_specific_fields"}
NOT_SUPPORTED = {"function_call", "audio"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the chat template gets it: content is one string, roles are the template's."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in given.items() if value is not None}


def as_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid(
            "messages",
            f"`messages` must be a list of 1 to {MAX_MESSAGES} messages, but {shown(value)}"
            " was given",
        )
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(value)]
    read_arguments(messages)
    return [Message(**message) for message in in_call_order(messages)]


def _message(item: Any, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong(path, "an object", item)
    given = {name: value for name, value in item.items() if value is not None}
    _check_names(given, path)
    _check_role(given, path)
    if given.pop("refusal", ""):
        given.setdefault("content", item["refusal"])
    if given.get("tool_calls"):
        given["tool_calls"] = as_tool_calls(given["tool_calls"], f"{path}.tool_calls")
        given.setdefault("content", "")
    else:
        given.pop("tool_calls", None)
    if "content" not in given:
        raise ApiError(
            400,
            f"`{path}.content` is required: a string or a list of text parts",
            param=f"{path}.content",
            code="missing_field",
        )
    role = "system" if given["role"] == "developer" else given["role"]
    content = _content(given["content"], f"{path}.content", role=role)
    return {**given, "role": role, "content": content}


def _check_role(given: dict[str, Any], path: str) -> None:
    """The labels, and which role may have which field. What the assistant refused to say was said
    instead of a content, so a message has one of the two."""
    for name in ("role", "name", "tool_call_id", "refusal"):
        value, longest = given.get(name, ""), None if name == "refusal" else MAX_LABEL_LENGTH
        if not isinstance(value, str) or (longest is not None and len(value) > longest):
            allowed = "a string" if longest is None else f"a string of at most {longest} characters"
            where = f"{path}.{name}"
            raise wrong(where, allowed, value)
    if given.get("role") not in ROLES:
        raise invalid(f"{path}.role", f"`{path}.role` must be one of {', '.join(ROLES)}")
    for name, needed in ROLE_OF_FIELD.items():
        if given.get(name) and given["role"] != needed:
            where = f"{path}.{name}"
            raise invalid(where, f"`{where}` is only allowed in messages of the role {needed}")
    if given.get("refusal") and given.get("content"):
        where = f"{path}.refusal"
        raise invalid(where, f"`{where}` is only allowed without a content")


def _check_names(given: dict[str, Any], path: str) -> None:
    for name, value in given.items():
        where = f"{path}.{name[:64]}"
        if name in NOT_SUPPORTED:
            if value not in ([], ""):
                message = f"`{where}` is not supported by this server; it must be left out"
                raise unsupported(where, message)
        elif name not in FIELDS | ECHOED:
            raise unknown_field(where)
    for name in NOT_SUPPORTED | ECHOED:
        given.pop(name, None)


def _content(value: Any, path: str, *, role: str) -> str:
    """A string, or text parts joined by line breaks; the assistant's may be refusals."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong(path, "a string or a list of at least one text part", value)
    return "\n".join(_part(part, f"{path}[{i}]", role=role) for i, part in enumerate(value))


def _part(part: Any, path: str, *, role: str) -> str:
    kind = "refusal" if role == "assistant" and _type(part) == "refusal" else "text"
    shape = f'{{"type": "{kind}", "{kind}": a string}}'
    if not isinstance(part, dict):
        raise wrong(path, shape, part)
    if part.get("type") != kind:
        raise ApiError(
            400,
            f'`{path}.type` must be "text" (or "refusal", of the assistant): this server takes no'
            " images, audio or files",
            param=f"{path}.type",
            code="unsupported_field" if isinstance(part.get("type"), str) else "invalid_value",
        )
    return text_of(part, path, kind)


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None
