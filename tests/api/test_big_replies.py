"""Replies with very many log-probabilities are bounded, and writing them blocks no one else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient, make_ready
from tests.support.serving import MODEL, Served, serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURNS = [{"role": "user", "content": "a"}]


class BlockingTokenizer(ByteTokenizer):
    """Outside the event loop's thread, `token_bytes` blocks until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_thread: threading.Thread | None = None
        self.called, self.free = threading.Event(), threading.Event()

    def token_bytes(self, token: int) -> bytes:
        if self.loop_thread not in (None, threading.current_thread()):
            self.called.set()
            self.free.wait(60)
        return super().token_bytes(token)


def note_loop(served: Served, tokenizer: BlockingTokenizer) -> None:
    def note() -> None:
        tokenizer.loop_thread = threading.current_thread()

    served.call(note)
    served.until(lambda: tokenizer.loop_thread is not None)


LONG = "ab" * 400
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts": (COMPLETIONS, {"prompt": LONG, "prompt_logprobs": 3}),
    "a chat's prompt": (CHAT, {"messages": [{**TURNS[0], "content": LONG}], "prompt_logprobs": 3}),
    "an echo": (COMPLETIONS, {"prompt": LONG, "echo": True, "logprobs": 3}),
    "a streamed echo": (
        COMPLETIONS, {"prompt": LONG, "echo": True, "logprobs": 3, "stream": True},
    ),
    "a long reply": (COMPLETIONS, {"prompt": "a", "max_tokens": 600, "logprobs": 3}),
    "a long reply of a chat": (
        CHAT, {"messages": TURNS, "max_tokens": 600, "logprobs": True, "top_logprobs": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REQUESTS)
def test_others_are_served_while_it_is_written(what: str) -> None:
    """Bug: 100 prompts of 2,000 tokens with 20 alternatives each blocked the event loop for 14
    seconds, /health and every stream included."""
    path, fields = REQUESTS[what]
    tokenizer, client = BlockingTokenizer(), FakeClient(ready=make_ready(max_model_len=4096))
    body = {"model": MODEL, "max_tokens": 2, "ignore_eos": True, "seed": 1, **fields}
    with serve(client, tokenizer=tokenizer) as served, ThreadPoolExecutor() as pool:
        plain = httpx.post(f"{served.url}{path}", json=body, timeout=60).text
        note_loop(served, tokenizer)
        posting = pool.submit(httpx.post, f"{served.url}{path}", json=body, timeout=60)
        assert tokenizer.called.wait(30), "it is written in the loop"
        assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
        assert not posting.done()
        tokenizer.free.set()
        reply = posting.result()
    assert reply.status_code == 200
    assert (len(reply.text), reply.text[-40:]) == (len(plain), plain[-40:])


SIXTY = [{"role": "user", "content": "a" * 60}]


@pytest.mark.parametrize(
    ("param", "path", "fields"),
    [
        ("prompt_logprobs", COMPLETIONS, {"prompt": ["a" * 99, "b" * 99], "prompt_logprobs": 9}),
        ("prompt_logprobs", CHAT, {"messages": SIXTY, "prompt_logprobs": 20, "max_tokens": 1}),
        ("logprobs", COMPLETIONS, {"prompt": "a" * 199, "echo": True, "logprobs": 5}),
        ("logprobs", COMPLETIONS, {"prompt": "a", "logprobs": 0, "n": 11, "max_tokens": 100}),
        ("top_logprobs", CHAT, {"messages": TURNS, "logprobs": True, "max_tokens": 1025}),
    ],
)
def test_more_than_a_reply_may_hold_is_refused(
    param: str, path: str, fields: dict[str, Any]
) -> None:
    """Law: a 400 that names the field and the bound, before anything reaches the engine."""
    client = FakeClient(ready=make_ready(max_model_len=4096))
    with serve(client, max_logprobs=1024) as served:
        reply = httpx.post(f"{served.url}{path}", json={"model": MODEL, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert "at most 1024 are given (`server.max_logprobs`)" in error["message"]
    assert not client.submitted


def test_log_probabilities_do_not_require_max_tokens() -> None:
    """Law: a chat with log-probabilities but no `max_tokens` is served at any context length."""
    client = FakeClient(ready=make_ready(max_model_len=10**6))
    body = {"model": MODEL, "messages": TURNS, "logprobs": True, "top_logprobs": 20, "stop": "a"}
    with serve(client, max_logprobs=1024) as served:
        assert httpx.post(f"{served.url}{CHAT}", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_default_length_is_bounded_by_the_log_probabilities(stream: bool) -> None:
    """Bug: a reply of any length was kept in memory, each token with its alternatives. Law: choices
    share the allowed log-probabilities and end by `length`; a larger `min_tokens` is refused."""
    client = FakeClient(ready=make_ready(max_model_len=10**6, eos_ids=[]), tokens_per_step=9)
    body = {"model": MODEL, "messages": TURNS, "logprobs": True, "top_logprobs": 7, "n": 2}
    with serve(client, max_logprobs=1024) as served:
        reply = httpx.post(f"{served.url}{CHAT}", json={**body, "stream": stream})
        assert reply.status_code == 200
        assert {submit.params.max_tokens for submit in client.submitted} == {64}
        if not stream:
            choices = reply.json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
            assert [len(choice["logprobs"]["content"]) for choice in choices] == [64, 64]
        reply = httpx.post(f"{served.url}{CHAT}", json={**body, "min_tokens": 65})
        assert reply.json()["error"]["param"] == "top_logprobs"
