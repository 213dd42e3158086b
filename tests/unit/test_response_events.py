"""Laws of a Response's events, over random replies cut into random chunks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.api.errors import ApiError
from server.api.responses import ResponseEvents
from server.api.shapes import ChatShape
from tests.support.response_stream_rules import read_response

Choice = dict[str, Any]

TEXT = st.text(alphabet="aé🙂 \n<{", min_size=1, max_size=6)
ARGUMENTS = st.lists(TEXT, max_size=3)
THOUGHT = st.tuples(st.just("thought"), TEXT)
PIECES = st.lists(st.one_of(TEXT, THOUGHT, st.tuples(st.just("call"), ARGUMENTS)), max_size=6)
FINISH = st.sampled_from(["stop", "length", "tool_calls"])


def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> Choice:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def chunks(pieces: list[Any], finish: str, *, logprobs: bool) -> list[Choice]:
    """Return chat chunks of a reply (text, thinking and calls), with one logprobs entry for each
    piece of text."""
    made: list[Choice] = []
    calls = 0
    for piece in pieces:
        if isinstance(piece, str):
            entry = {"token": piece, "logprob": -1.0, "bytes": list(piece.encode())}
            made.append(chunk({"content": piece}, None, {"content": [entry]} if logprobs else None))
            continue
        if piece[0] == "thought":
            made.append(chunk({"reasoning_content": piece[1]}))
            continue
        begin = {"index": calls, "id": f"call_{calls}", "type": "function"}
        function = {"name": f"f{calls}", "arguments": ""}
        made.append(chunk({"tool_calls": [{**begin, "function": function}]}))
        made += [
            chunk({"tool_calls": [{"index": calls, "function": {"arguments": text}}]})
            for text in piece[1]
        ]
        calls += 1
    return [*made, chunk({}, finish)]


def sent(payload: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.partition(b"data: ")[2]) for event in payload.split(b"\n\n")[:-1]]


def events_of(
    choices: list[Choice],
    *,
    cut: int | None = None,
    with_logprobs: bool = False,
) -> Iterator[dict[str, Any]]:
    numbers = itertools.count()
    telling = ResponseEvents(
        {"id": "resp_1"},
        ChatShape("resp_1"),
        lambda: {"input_tokens": 1},
        with_logprobs=with_logprobs,
        draw_id=lambda prefix: f"{prefix}_{next(numbers)}",
    )
    yield from sent(telling.begin())
    for choice in choices[:cut]:
        yield from telling.of_choice(choice)
    if cut is None:
        yield from sent(telling.end())
    else:
        yield from sent(telling.fail(ApiError(503, "the engine died")))


@given(pieces=PIECES, finish=FINISH, logprobs=st.booleans())
def test_events_come_in_order_and_tell_the_response(
    pieces: list[Any], finish: str, logprobs: bool
) -> None:
    """Law: events come in order and add up to the Response, whatever its output, even none."""
    made = chunks(pieces, finish, logprobs=logprobs)
    calls = [piece for piece in pieces if piece[0] == "call"]
    response = read_response(events_of(made, with_logprobs=logprobs))
    assert response["status"] == ("incomplete" if finish == "length" else "completed")
    items = response["output"]
    assert items, "a Response is never empty"
    assert [item["arguments"] for item in items if item["type"] == "function_call"] == [
        "".join(arguments) for _, arguments in calls
    ]
    text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
    assert text == "".join(piece for piece in pieces if isinstance(piece, str))
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1)
    assert items[-1]["status"] == response["status"]
    if logprobs and not calls:
        parts = [item["content"][0] for item in items if item["type"] == "message"]
        assert "".join(entry["token"] for part in parts for entry in part["logprobs"]) == text


@given(pieces=PIECES, finish=FINISH, data=st.data())
def test_a_cut_stream_fails_in_order(pieces: list[Any], finish: str, data: st.DataObject) -> None:
    """Law: the open item gets no done events, and the Response holds what had arrived."""
    made = chunks(pieces, finish, logprobs=False)
    cut = data.draw(st.integers(0, len(made) - 1))
    *before, last = events_of(made, cut=cut)
    assert last["type"] == "response.failed"
    assert last["sequence_number"] == len(before)
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine died"}
    open_items = [item for item in response["output"] if item["status"] == "in_progress"]
    assert open_items == response["output"][-1:][: len(open_items)]
    heard = "".join(event.get("delta", "") for event in before)
    shown = "".join(
        item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        for item in response["output"]
    )
    assert shown == heard


@given(pieces=PIECES, finish=FINISH, sizes=st.lists(st.integers(1, 4), min_size=1))
def test_how_a_reply_is_cut_into_chunks_does_not_matter(
    pieces: list[Any], finish: str, sizes: list[int]
) -> None:
    """Law: log-probabilities that arrive before their text, as with held-back text, end up in the
    same places."""
    made = chunks(pieces, finish, logprobs=True)
    early, step = [], itertools.cycle(sizes)
    while made:
        size = next(step)
        group, made = made[:size], made[size:]
        entries = [e for choice in group for e in (choice["logprobs"] or {}).get("content", [])]
        group[0] = {**group[0], "logprobs": {"content": entries}}
        early += [group[0], *({**choice, "logprobs": None} for choice in group[1:])]
    plain = chunks(pieces, finish, logprobs=True)
    assert read_response(events_of(early, with_logprobs=True)) == read_response(
        events_of(plain, with_logprobs=True)
    )
