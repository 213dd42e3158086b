"""Prediction, per-request speculation and provenance over HTTP, with the official SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from engine.messages import Speculation
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script, make_ready
from tests.support.serving import MODEL, Served, serve

REPLY = list("the quick brown fox €".encode())
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 40}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": PLAIN}
PREDICTION = {"type": "content", "content": "the quick brown fox"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose steps bring three draft tokens and one token of the target's own."""
    with serve(FakeClient(script=listed_script(REPLY, then=257), tokens_per_step=4)) as served:
        yield served


@pytest.fixture(scope="module")
def sdk(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


def post(served: Served, path: str, **fields: Any) -> Any:
    reply = httpx.post(f"{served.url}{path}", json={**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_predicted_outputs_with_the_sdk(served: Served, sdk: OpenAI) -> None:
    """OpenAI's own call; the usage reports accepted and rejected tokens in OpenAI's fields."""
    reply = sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        prediction={"type": "content", "content": "the quick brown fox"},
    )
    assert served.client.submitted[-1].params.prediction == tuple(b"the quick brown fox")
    assert reply.choices[0].message.content == "the quick brown fox €"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 24  # 23 bytes and the end-of-text token
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == 18
    assert details.rejected_prediction_tokens == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_gets_the_prediction(served: Served, path: str, n: int, stream: bool) -> None:
    """Law: each of n choices, streamed or not, follows the prediction by itself, and the counts are
    sums over the choices."""
    before = len(served.client.submitted)
    fields: dict[str, Any] = {"n": n, "prediction": PREDICTION, "temperature": 0.7}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        body = {**BODIES[path], **fields}
        usage = chunks(served, path, body)[-1]["usage"]
    else:
        usage = post(served, path, **fields)["usage"]
    sent = served.client.submitted[before:]
    assert [s.params.prediction for s in sent] == [tuple(b"the quick brown fox")] * n
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 18 * n,
        "rejected_prediction_tokens": 0,
        "reasoning_tokens": 0,
    }
    speculation = usage["speculation"]
    assert speculation["proposers"] == ["prediction", "draft_model"]
    parts = {"proposed": speculation["proposed"], "accepted": speculation["accepted"]}
    assert speculation["by_proposer"] == {"prediction": parts}
    assert parts["accepted"] == 18 * n


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    import json

    with httpx.stream("POST", f"{served.url}{path}", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if "data: " in line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_parts_of_a_prediction_follow_each_other(served: Served) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "quick"}]
    post(served, "/v1/chat/completions", prediction={"type": "content", "content": parts})
    assert served.client.submitted[-1].params.prediction == tuple(b"the quick")


def test_tokens_that_a_stop_string_cuts_off_are_rejected(served: Served) -> None:
    """Law: accepted prediction tokens are part of the completion; those after a stop string are
    rejected, though the target agreed with them."""
    usage = post(served, "/v1/completions", prediction=PREDICTION, stop="q")["usage"]
    assert usage["completion_tokens"] == 5  # "the q": three guesses, one of the target's, one more
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 4
    assert details["rejected_prediction_tokens"] >= 2


EFFECTIVE = [
    (None, (True, "auto", ["draft_model"]), None),
    ({}, (True, "auto", ["draft_model"]), Speculation()),
    ({"enabled": False}, (False, 0, []), Speculation(max_draft=0)),
    (
        {"enabled": False, "max_draft": None, "proposers": None},
        (False, 0, []),
        Speculation(max_draft=0),
    ),
    ({"max_draft": 0}, (False, 0, []), Speculation(max_draft=0)),
    ({"max_draft": 4}, (True, 4, ["draft_model"]), Speculation(max_draft=4)),
    ({"max_draft": "auto"}, (True, "auto", ["draft_model"]), Speculation()),
    (
        {"proposers": ["ngram", "draft_model"]},
        (True, "auto", ["ngram", "draft_model"]),
        Speculation(proposers=("ngram", "draft_model")),
    ),
    (
        {"proposers": ["prediction", "ngram"], "max_draft": None},
        (True, "auto", ["ngram"]),
        Speculation(proposers=("prediction", "ngram")),
    ),
    (
        {"proposers": ["prediction"]},
        (False, 0, []),
        Speculation(proposers=("prediction",)),
    ),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("wish", "expected", "sent"), EFFECTIVE)
def test_effective_values_are_echoed(
    served: Served, path: str, wish: Any, expected: tuple[Any, ...], sent: Speculation | None
) -> None:
    """Law: the reply reports the effective settings; a proposer that has nothing to work with (as
    `prediction` without a prediction) is not listed."""
    reply = post(served, path, speculation=wish)
    speculation = reply["usage"]["speculation"]
    assert (speculation["enabled"], speculation["max_draft"], speculation["proposers"]) == expected
    assert served.client.submitted[-1].params.speculation == sent
    streamed = chunks(
        served,
        path,
        {
            **BODIES[path],
            "speculation": wish,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    assert streamed[-1]["usage"]["speculation"].keys() == speculation.keys()
    assert streamed[-1]["usage"]["speculation"]["proposers"] == expected[2]


def test_a_server_that_does_not_speculate_says_so() -> None:
    """At K = 0 a prediction is accepted but has no effect, and a request for guesses is a 400."""
    ready = make_ready(k_max=0, proposers=(), default_proposers=("draft_model",))
    with serve(FakeClient(ready=ready)) as served:
        reply = post(served, "/v1/completions", prediction=PREDICTION)
        assert reply["usage"]["speculation"]["enabled"] is False
        for wish, param, problem in [
            ({"max_draft": 1}, "speculation.max_draft", "from 0 to 0"),
            ({"proposers": ["ngram"]}, "speculation.proposers[0]", "speculation is off"),
        ]:
            body = {**PLAIN, "speculation": wish}
            reply = httpx.post(f"{served.url}/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param
            assert problem in reply.json()["error"]["message"]


def test_max_draft_beyond_the_servers_k_names_the_range(served: Served) -> None:
    body = {**PLAIN, "speculation": {"max_draft": 5}}
    error = httpx.post(f"{served.url}/v1/completions", json=body).json()["error"]
    assert error["message"] == (
        '`speculation.max_draft` must be "auto" or an integer from 0 to 4, but 5 was given'
    )


def test_a_prediction_longer_than_the_context(served: Served) -> None:
    for size in (513, 100_000):
        body = {**PLAIN, "prediction": {"type": "content", "content": "x" * size}}
        reply = httpx.post(f"{served.url}/v1/completions", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert reply.json()["error"]["param"] == "prediction.content"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", [{}, {"stop": "own"}, {"logprobs": True}, {"n": 2}])
def test_provenance_is_the_text(served: Served, path: str, fields: dict[str, Any]) -> None:
    """Law: the pieces add up to the text, streamed or not, and provenance does not change it."""
    if path == "/v1/completions" and "logprobs" in fields:
        fields = {"logprobs": 1}
    plain = post(served, path, **fields)
    whole = post(served, path, provenance=True, **fields)
    body = {**BODIES[path], **fields, "provenance": True, "stream": True}
    streamed = chunks(served, path, body)
    for index, choice in enumerate(whole["choices"]):
        text = choice.get("text") or choice["message"]["content"]
        other = plain["choices"][index]
        assert text == (other.get("text") or other["message"]["content"])
        assert "provenance" not in other
        pieces = choice["provenance"]
        assert "".join(piece["text"] for piece in pieces) == text
        assert {piece["source"] for piece in pieces} == {"draft_model", "target"}
        streamed_pieces = [
            piece
            for chunk in streamed
            for other in chunk["choices"]
            if other["index"] == index
            for piece in other.get("provenance", [])
        ]
        assert streamed_pieces == pieces


def test_provenance_names_who_proposed(served: Served) -> None:
    [choice] = post(served, "/v1/completions", provenance=True, prediction=PREDICTION)["choices"]
    assert [(p["text"], p["source"]) for p in choice["provenance"][:5]] == [
        ("t", "prediction"),
        ("h", "prediction"),
        ("e", "prediction"),
        (" ", "target"),
        ("q", "prediction"),
    ]


def test_provenance_of_an_echoed_prompt_is_of_what_follows() -> None:
    """An echoed prompt has no provenance, since nobody proposed it."""
    client = FakeClient(script=listed_script(list(b"yes"), then=257), tokens_per_step=2)
    with serve(client, tokenizer=ByteTokenizer()) as served:
        [choice] = post(served, "/v1/completions", provenance=True, echo=True)["choices"]
        assert choice["text"] == "hiyes"
        assert [p["text"] for p in choice["provenance"]] == ["y", "e", "s"]
