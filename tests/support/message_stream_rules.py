"""The rules of a message's events: their order, and that they add up to the message.

`read_message(events)` reads a stream as a strict client would and returns the resulting message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
EXTRAS = ("provenance", "token_ids")


def events_of(text: str) -> list[Event]:
    """Return the events of a stream; each must be named after its type, and there is no [DONE]."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def read_message(events: Iterable[Event]) -> dict[str, Any]:
    """Return the message. Raises AssertionError if the events break a rule."""
    first, *middle, last, stop = list(events)
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert stop == {"type": "message_stop"}
    rest = iter(middle)
    message["content"] = [_block(i, start, rest) for i, start in enumerate(rest)]
    assert last["type"] == "message_delta"
    assert last["usage"].items() >= {"input_tokens": message["usage"]["input_tokens"]}.items()
    for name in EXTRAS:
        heard = [entry for event in [*middle, last] for entry in event.get(name, ())]
        message |= {name: heard} if heard else {}
    return {**message, **last["delta"], "usage": last["usage"]}


def _block(index: int, start: Event, rest: Iterator[Event]) -> dict[str, Any]:
    assert (start["type"], start["index"]) == ("content_block_start", index)
    block, text, own = start["content_block"], "", start["content_block"]["type"]
    is_text = own in ("text", "thinking")
    kind, name = (f"{own}_delta", own) if is_text else ("input_json_delta", "partial_json")
    assert (block[own] == "") if is_text else (block["input"] == {})
    while (event := next(rest))["type"] == "content_block_delta":
        assert (event["index"], event["delta"]["type"]) == (index, kind)
        assert event["delta"][name]
        text += event["delta"][name]
    assert (event["type"], event["index"]) == ("content_block_stop", index)
    return {**block, own: text} if is_text else {**block, "input": json.loads(text)}
