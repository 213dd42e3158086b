"""The text of a reply with tools, in the API's shapes.

A reply's text is read while it comes (`text.tools.calls`), so the deltas of a stream put together
are the message of the same reply unstreamed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from server.generation.choice import Finish
from server.text.tools.calls import CallArguments, CallBegin, Text, ToolCallParser, ToolEvent


class CallReader:
    """The text of one choice -> deltas of its message, each of content or of one call."""

    def __init__(self, parser: ToolCallParser, name: str) -> None:
        self._parser = parser
        self._name = name

    def push(self, text: str, finish: Finish | None) -> list[dict[str, Any]]:
        events = self._parser.push(text)
        if finish is not None:
            events += self._parser.finish()
        return [self._delta(event) for event in merged(events)]

    def finish(self, finish: Finish | None) -> str | None:
        """The reason that clients are told: a reply that came to its end with calls in it ended
        for them."""
        return "tool_calls" if finish == "stop" and self._parser.num_calls else finish

    def _delta(self, event: ToolEvent) -> dict[str, Any]:
        match event:
            case Text(text):
                return {"content": text}
            case CallBegin(index, name):
                begin = {"index": index, "id": self._id(index), "type": "function"}
                return {"tool_calls": [{**begin, "function": {"name": name, "arguments": ""}}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _id(self, index: int) -> str:
        name = f"{self._name}-{index}".encode()
        return "call_" + hashlib.sha256(name).hexdigest()[:24]


def merged(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one."""
    out: list[ToolEvent] = []
    for event in events:
        match (out[-1] if out else None, event):
            case (Text(before), Text(text)):
                out[-1] = Text(before + text)
            case (CallArguments(index, before), CallArguments(_, text)):
                out[-1] = CallArguments(index, before + text)
            case _:
                out.append(event)
    return out


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message, put together of its deltas."""
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content.append(delta.get("content", ""))
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                function = {"name": piece["function"]["name"], "arguments": ""}
                calls.append({"id": piece["id"], "type": "function", "function": function})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    text = "".join(content)
    message = {"role": "assistant", "content": text, "refusal": None}
    return {**message, "content": text or None, "tool_calls": calls} if calls else message
