"""The messages of a chat: from what clients send to what the chat template gets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.api.errors import ApiError, invalid, unknown_field, unsupported
from server.api.explain import shown
from server.api.limits import MAX_LABEL_LENGTH, MAX_MESSAGES
from server.api.schema import Part
from server.api.schema_parts import text_of
from server.api.schema_tool_calls import as_tool_calls, in_call_order, read_arguments

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = {"role", "content", "name", "refusal", "tool_calls", "tool_call_id"}
ROLE_OF_FIELD = {"refusal": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}
# What the SDKs' own message objects carry when they are sent back; it says nothing new.
ECHOED = {"parsed", "annotations", "provider_specific_fields"}
NOT_SUPPORTED = {"function_call", "audio"}


class Message(Part):
    """One message as the chat template gets it: content is one string, roles are the template's."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = Field(None, max_length=MAX_LABEL_LENGTH)
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = Field(None, max_length=MAX_LABEL_LENGTH)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}


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
        raise invalid(path, f"`{path}` must be an object, but {shown(item)} was given")
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
            raise invalid(where, f"`{where}` must be {allowed}, but {shown(value)} was given")
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
        allowed = "a string or a list of at least one text part"
        raise invalid(path, f"`{path}` must be {allowed}, but {shown(value)} was given")
    return "\n".join(_part(part, f"{path}[{i}]", role=role) for i, part in enumerate(value))


def _part(part: Any, path: str, *, role: str) -> str:
    kind = "refusal" if role == "assistant" and _type(part) == "refusal" else "text"
    shape = f'{{"type": "{kind}", "{kind}": a string}}'
    if not isinstance(part, dict):
        raise invalid(path, f"`{path}` must be {shape}, but {shown(part)} was given")
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
