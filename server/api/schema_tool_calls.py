"""Calls and their results inside `messages`: what the chat template gets of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.api.body import num_values
from server.api.errors import ApiError, invalid, missing
from server.api.explain import shown
from server.api.limits import MAX_CALLS, MAX_LABEL_LENGTH, MAX_VALUES
from server.api.schema_tools import checked, function_name

ECHOED = {"parsed_arguments"}  # what the SDK's `parse` adds to calls, which come back as they are
MAX_ARGUMENT_DEPTH = 64


def as_tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    """An assistant's calls, their arguments still a text (`read_arguments`)."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CALLS:
        raise invalid(
            path, f"`{path}` must be a list of 1 to {MAX_CALLS} calls, but {shown(value)} was given"
        )
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
    function = checked(call["function"], where, {"name", "arguments", *ECHOED}, kind=None)
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
