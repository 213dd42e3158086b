"""`input` of /v1/responses: items -> messages of the chat endpoint, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from server.api.errors import ApiError, invalid, missing, unknown_field
from server.api.explain import must_be, shown
from server.api.limits import MAX_LABEL_LENGTH, MAX_MESSAGES

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
        raise invalid(path, f"`{path}` must be an object, but {shown(item)} was given")
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
        allowed = "a string or a list of at least one text part"
        raise invalid(path, f"`{path}` must be {allowed}, but {shown(value)} was given")
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
        raise invalid(path, f"`{path}` must be {shape}, but {shown(part)} was given")
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
        raise invalid(
            f"{path}.text", f"`{path}.text` must be a string, but {shown(text)} was given"
        )
    return {"type": "text", "text": text}


def _check_names(given: dict[str, Any], path: str, names: set[str]) -> None:
    for name, value in given.items():
        where = f"{path}.{name[:64]}"
        if name not in names:
            raise unknown_field(where)
        if name == "status" and value not in STATUSES:
            raise invalid(where, f"`{where}` must be one of {', '.join(STATUSES)}")
        if name == "id" and not (isinstance(value, str) and len(value) <= MAX_LABEL_LENGTH):
            allowed = f"a string of at most {MAX_LABEL_LENGTH} characters"
            raise invalid(where, f"`{where}` must be {allowed}, but {shown(value)} was given")
