"""Both endpoints' fields on the real engine and the built-in pair: draft tokens change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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
    "filters": (COMPLETIONS, {"prompt": CODE, "top_k": 40, "top_p": 0.9, "min_p": 0.02}),
    "penalties": (
        COMPLETIONS,
        {"prompt": CODE, "presence_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {"5": 4}},
    ),
    "stop": (COMPLETIONS, {"prompt": CODE, "stop": ["return", "\n\n"], "n": 2, "logprobs": 2}),
    "held to JSON": (CHAT, {"messages": ASK, "response_format": {"type": "json_object"}}),
    "spelled out": (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>x"}]}),
}  # fmt: skip
EVERYBODY = ["grammar", "prediction", "ngram", "draft_model"]
WISHES: list[dict[str, Any]] = [
    {},
    {"enabled": False},
    {"max_draft": 1},
    {"max_draft": 8, "proposers": ["ngram"]},
    {"max_draft": 4, "proposers": ["draft_model", "prediction"]},
    {"proposers": EVERYBODY},
    {"max_draft": 3, "proposers": EVERYBODY[::-1]},
]


@pytest.fixture(scope="module")
def http(pair_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pair_url, timeout=300) as http:
        yield http


def ask(http: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "foredraft-demo", "max_tokens": 24, "seed": 5, "return_token_ids": True}
    reply = http.post(route, json={**body, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def same(one: Any, other: Any, path: str = "") -> None:
    """Assert equality, but for floats within 1e-4 and what is particular to each reply."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        its_own = {"id", "created", "speculation", "cached_tokens", "completion_tokens_details"}
        for name in one.keys() - its_own:
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
def test_draft_tokens_change_nothing(http: httpx.Client, name: str, temperature: float) -> None:
    """Law: for every proposer, cached prompt or not, ids, texts, choices and log-probabilities
    equal those of plain decoding."""
    route, fields = REQUESTS[name]
    body = {**fields, "temperature": temperature}
    plain = ask(http, route, **body, speculation={"enabled": False})
    assert plain["usage"]["speculation"]["proposed"] == 0
    for proposer in ("draft_model", "ngram"):
        wish = {"max_draft": 4, "proposers": [proposer]}
        speculated = ask(http, route, **body, speculation=wish)
        same(plain, speculated)


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_concurrent_settings_change_nothing(http: httpx.Client, temperature: float) -> None:
    """Law: sixteen concurrent requests, each with its own draft limit and proposers, with right and
    wrong predictions among them, say what each says alone without speculation."""
    plain = {
        name: ask(http, route, **fields, temperature=temperature, speculation={"enabled": False})
        for name, (route, fields) in REQUESTS.items()
    }

    cases = list(product(REQUESTS, WISHES))

    def ask_with_speculation(number: int) -> dict[str, Any]:
        name, wish = cases[number]
        route, fields = REQUESTS[name]
        choice = plain[name]["choices"][0]
        known = choice["text"] if route == COMPLETIONS else choice["message"]["content"]
        text = f"of old {known}" if number % 3 else known or "x"
        more = {} if number % 2 else {"prediction": {"type": "content", "content": text}}
        return ask(http, route, **fields, temperature=temperature, speculation=wish, **more)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask_with_speculation, range(len(cases))))
    for (name, wish), reply in zip(cases, found, strict=True):
        same(plain[name], reply, f"{name} with {wish}: ")


def test_a_prompt_scores_the_same_in_both_shapes(http: httpx.Client) -> None:
    """Law: echo and prompt_logprobs report the same scores for a prompt."""
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
    """Law: of the choices that n would have given, best_of picks the likeliest per token."""
    fields: dict[str, Any] = {"prompt": CODE, "temperature": 1, "logprobs": 0, "ignore_eos": True}
    every = ask(http, COMPLETIONS, **fields, n=6)["choices"]
    best = ask(http, COMPLETIONS, **fields, n=2, best_of=6)["choices"]
    every.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["token_ids"] for choice in best] == [c["token_ids"] for c in every[:2]]
