"""The rules of a Response's events: their order, and that they add up to the Response.

`read_response(events)` reads a stream as a strict client would and returns the resulting Response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
EXTRAS = ("provenance", "token_ids")
END = {"response.completed", "response.incomplete", "response.failed"}


def read_response(events: Iterable[Event]) -> dict[str, Any]:
    """Return the Response. Raises AssertionError if the events break a rule."""
    numbered = list(events)
    assert [event["sequence_number"] for event in numbered] == list(range(len(numbered)))
    rest = iter(numbered)
    for kind in ("response.created", "response.in_progress"):
        begin = next(rest)
        assert begin["type"] == kind
        assert begin["response"]["status"] == "in_progress"
        assert (begin["response"]["output"], begin["response"]["usage"]) == ([], None)
    items: list[Any] = []
    for event in rest:
        if event["type"] in END:
            assert next(rest, None) is None, "an event after the last one"
            _check_extras(numbered, event["response"])
            return _checked(event, items)
        assert event["type"] == "response.output_item.added", event["type"]
        assert event["output_index"] == len(items)
        kind = event["item"]["type"]
        item = _call(event, rest) if kind == "function_call" else _text(event, rest)
        items.append(item)
    raise AssertionError("the stream has no end")


def _check_extras(events: list[Event], response: dict[str, Any]) -> None:
    """Check that the EXTRAS of delta events are the beginning of those of the Response."""
    for name in EXTRAS:
        heard = [entry for event in events for entry in event.get(name, ())]
        assert heard == response.get(name, [])[: len(heard)]


def _checked(event: Event, items: list[Any]) -> dict[str, Any]:
    response: dict[str, Any] = event["response"]
    assert event["type"] == f"response.{response['status']}"
    assert response["output"] == items
    assert (response["usage"] is None) == (response["status"] == "failed")
    assert (response["error"] is None) == (response["status"] != "failed")
    assert (response["incomplete_details"] is None) == (response["status"] != "incomplete")
    assert (response["completed_at"] is None) == (response["status"] != "completed")
    return response


def _text(added: Event, rest: Iterator[Event]) -> Any:
    """Read a message, or reasoning, which has no log-probabilities."""
    item, index = added["item"], added["output_index"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    kind, own = {"message": ("output_text", "role"), "reasoning": ("reasoning_text", "summary")}[
        item["type"]
    ]
    assert item[own] == {"role": "assistant", "summary": []}[own]
    where = {"item_id": item["id"], "output_index": index, "content_index": 0}
    part = _next(rest, "response.content_part.added", where)["part"]
    assert (part["type"], part["text"], part.get("logprobs", [])) == (kind, "", [])
    text, logprobs = "", list[Any]()
    while (event := next(rest))["type"] == f"response.{kind}.delta":
        assert where.items() <= event.items()
        assert event["delta"] or event["logprobs"]
        text += event["delta"]
        logprobs += event["logprobs"] if own == "role" else []
    assert event["type"] == f"response.{kind}.done"
    assert where.items() <= event.items()
    assert (event["text"], event.get("logprobs", [])) == (text, logprobs)
    part = {**part, "text": text} | ({"logprobs": logprobs} if "logprobs" in part else {})
    assert _next(rest, "response.content_part.done", where)["part"] == part
    return _done(item, index, rest, content=[part])


def _call(added: Event, rest: Iterator[Event]) -> Any:
    item, index = added["item"], added["output_index"]
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "in_progress", "")
    assert item["name"]
    assert item["call_id"]
    where, text = {"item_id": item["id"], "output_index": index}, ""
    while (event := next(rest))["type"] == "response.function_call_arguments.delta":
        assert where.items() <= event.items()
        assert event["delta"]
        text += event["delta"]
    assert event["type"] == "response.function_call_arguments.done"
    assert where.items() <= event.items()
    assert event["arguments"] == text
    return _done(item, index, rest, arguments=text)


def _next(rest: Iterator[Event], kind: str, where: dict[str, Any]) -> Event:
    event = next(rest)
    assert event["type"] == kind
    assert where.items() <= event.items()
    return event


def _done(item: Any, index: int, rest: Iterator[Event], **fields: Any) -> Any:
    done = _next(rest, "response.output_item.done", {"output_index": index})["item"]
    assert done["status"] in ("completed", "incomplete")
    assert done == {**item, **fields, "status": done["status"]}
    return done
