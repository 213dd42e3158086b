"""Fields of both endpoints on the real engine with the built-in pair: guesses change nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.process.served import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = (sys.executable, "-m", "server", "serve", "--port", "0")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CODE = "import os\n\ndef read_file(path):\n"
ASK = [{"role": "user", "content": "What is the capital of France?"}]

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "best_of": (COMPLETIONS, {"prompt": [CODE, "x = 1\n"], "n": 2, "best_of": 5, "logprobs": 1}),
    "suffix": (COMPLETIONS, {"prompt": CODE, "suffix": "\n    return text\n"}),
    "suffix through the end": (
        COMPLETIONS, {"prompt": CODE, "suffix": "\n    return text\n", "ignore_eos": True},
    ),
    "echo": (COMPLETIONS, {"prompt": CODE, "echo": True, "logprobs": 3}),
    "scoring": (COMPLETIONS, {"prompt": CODE, "echo": True, "logprobs": 3, "max_tokens": 0}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": CODE, "prompt_logprobs": 3, "n": 2}),
    "chat logprobs": (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 4}),
    "chat prompt_logprobs": (CHAT, {"messages": ASK, "prompt_logprobs": 1, "priority": -3}),
    "continued": (
        CHAT,
        {
            "messages": [*ASK, {"role": "assistant", "content": "The capital of"}],
            "continue_final_message": True,
        },
    ),
    "spelled out": (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>x"}]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with asyncio.Runner() as runner:
        context = serving(COMMAND, os.environ)
        server = runner.run(context.__aenter__())
        with httpx.Client(base_url=server.http.base_url, timeout=300) as http:
            yield http
        runner.run(context.__aexit__(None, None, None))


def ask(http: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "foretoken-demo", "max_tokens": 24, "seed": 5, "return_token_ids": True}
    reply = http.post(route, json={**body, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def same(one: Any, other: Any, path: str = "") -> None:
    """Equal, but for numbers within 1e-4 and what tells of this very reply."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for name in one.keys() - {"id", "created", "speculation", "cached_tokens"}:
            same(one[name], other[name], f"{path}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}[{i}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4), path
    else:
        assert one == other, path


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_guesses_change_nothing(http: httpx.Client, name: str, temperature: float) -> None:
    """Law: ids, texts, choices and log-probabilities are those of plain decoding, for every
    proposer, cached prompt or not."""
    route, fields = REQUESTS[name]
    asked = {**fields, "temperature": temperature}
    plain = ask(http, route, **asked, speculation={"enabled": False})
    assert plain["usage"]["speculation"]["proposed"] == 0
    for proposer in ("draft_model", "ngram"):
        wish = {"max_draft": 4, "proposers": [proposer]}
        guessed = ask(http, route, **asked, speculation=wish)
        same(plain, guessed)


def test_a_prompt_scores_the_same_in_both_shapes(http: httpx.Client) -> None:
    """Law: what echo and prompt_logprobs say of a prompt is one and the same."""
    fields = {"prompt": CODE, "echo": True, "logprobs": 0, "prompt_logprobs": 0, "max_tokens": 0}
    [choice] = ask(http, COMPLETIONS, **fields)["choices"]
    assert choice["text"] == CODE
    assert choice["token_ids"] == []
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert choice["prompt_logprobs"][0] is None
    for token, score, entry in zip(
        choice["prompt_token_ids"][1:], scores[1:], choice["prompt_logprobs"][1:], strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(score, abs=1e-6)
        assert entry[str(token)]["rank"] >= 1


def test_the_best_are_the_best(http: httpx.Client) -> None:
    """Law: best_of picks, of the choices that n would have given, the likeliest per token."""
    asked: dict[str, Any] = {"prompt": CODE, "temperature": 1, "logprobs": 0, "ignore_eos": True}
    every = ask(http, COMPLETIONS, **asked, n=6)["choices"]
    best = ask(http, COMPLETIONS, **asked, n=2, best_of=6)["choices"]
    every.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["token_ids"] for choice in best] == [c["token_ids"] for c in every[:2]]
