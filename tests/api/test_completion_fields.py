"""best_of, suffix, scoring, prompt_logprobs and return_token_ids over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from engine.messages import Submit
from tests.support.byte_tokenizer import BOS, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script
from tests.support.serving import MODEL, Served, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
PROMPTS = [[104, 105], [106]]
HALF = pytest.approx(math.log(0.5))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeClient(tokens_per_step=3, score=lambda token: -token / 128)) as served:
        yield served


@pytest.fixture(scope="module")
def sdk(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def chunks_of(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [httpx.Response(200, text=line).json() for line in lines[:-1]]


def test_best_of_returns_the_likeliest_of_what_it_generates(sdk: OpenAI) -> None:
    """The candidates are the choices of n = best_of. Per prompt, the n with the highest
    log-probability per token are returned, best first; the usage counts all candidates."""
    every = sdk.completions.create(model=MODEL, prompt=PROMPTS, n=5, max_tokens=4, seed=3)
    texts = [choice.text for choice in every.choices]
    expected = []
    for group in (texts[:5], texts[5:]):
        expected += sorted(group, key=lambda text: sum(map(ord, text)))[:2]
    best = sdk.completions.create(model=MODEL, prompt=PROMPTS, n=2, best_of=5, max_tokens=4, seed=3)
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert [choice.logprobs for choice in best.choices] == [None] * 4, "nobody asked for them"
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens == 40
    assert best.usage.prompt_tokens == 3


def test_best_of_compares_by_token_not_by_length() -> None:
    """A long likely text beats a short unlikely one, though its total log-probability is lower."""

    def script(submit: Submit, position: int) -> int:
        if submit.params.seed == 7:  # choice 0
            return ord("z") if position == 0 else 257
        return ord("b") if position < 9 else 257

    scores = {ord("z"): -4.0, ord("b"): -1.0, 257: -1.0}
    with (
        serve(FakeClient(script=script, score=lambda token: scores[token])) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        reply = sdk.completions.create(
            model=MODEL, prompt="a", best_of=2, max_tokens=20, seed=7, logprobs=0
        )
        assert [choice.text for choice in reply.choices] == ["b" * 9]
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.token_logprobs == [-1.0] * 9
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 12


def test_best_of_has_limits(sdk: OpenAI) -> None:
    """best_of is at least n, is streamed only if equal to n, and is bounded over all prompts."""
    for fields, param in (
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 100, "prompt": ["a"] * 100}, "best_of"),
    ):
        body: dict[str, Any] = {"model": MODEL, "prompt": "a", **fields}
        with pytest.raises(BadRequestError) as refused:
            sdk.completions.create(**body)
        assert refused.value.param == param
    stream = sdk.completions.create(model=MODEL, prompt="a", n=2, best_of=2, stream=True)
    assert {chunk.choices[0].index for chunk in stream} == {0, 1}


def test_a_prompt_is_scored_without_generating(served: Served, sdk: OpenAI) -> None:
    """max_tokens 0 with echo returns the prompt and its log-probabilities only, streamed or not,
    even if the prompt fills the context."""
    reply = sdk.completions.create(
        model=MODEL, prompt=[104, 105, 106], max_tokens=0, echo=True, logprobs=1
    )
    [choice] = reply.choices
    assert choice.text == "hij"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["h", "i", "j"]
    assert choice.logprobs.token_logprobs == [None, -105 / 128, -106 / 128]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 0)
    assert served.client.submitted[-1].params.max_tokens == 0
    stream = sdk.completions.create(
        model=MODEL, prompt=[104, 105], max_tokens=0, echo=True, logprobs=0, stream=True
    )
    assert [chunk.choices[0].text for chunk in stream] == ["hi"]
    full = sdk.completions.create(model=MODEL, prompt=[104] * 512, max_tokens=0)
    assert full.choices[0].text == ""
    with pytest.raises(BadRequestError) as refused:
        sdk.completions.create(model=MODEL, prompt=[104] * 513, max_tokens=0)
    assert refused.value.code == "context_length_exceeded"


def test_suffix_asks_for_the_middle(served: Served, sdk: OpenAI) -> None:
    """The prompt is prefix, suffix, middle. Special tokens spelled in the code are text, ids stay
    ids, and the fill-in-the-middle tokens end the text."""
    mixed: Any = ["a<|fim_middle|>", [98, 257]]
    sdk.completions.create(model=MODEL, prompt=mixed, suffix="z", max_tokens=2)
    first, second = served.client.submitted[-2:]
    spelled = list(b"a<|fim_middle|>")
    assert first.prompt == [BOS, FIM_PREFIX, *spelled, FIM_SUFFIX, ord("z"), FIM_MIDDLE]
    assert second.prompt == [BOS, FIM_PREFIX, 98, 257, FIM_SUFFIX, ord("z"), FIM_MIDDLE]
    assert first.params.stop_token_ids == (256,)  # the others lie beyond this engine's vocabulary
    extra = {"ignore_eos": True}
    sdk.completions.create(model=MODEL, prompt="a", suffix="z", max_tokens=2, extra_body=extra)
    assert served.client.submitted[-1].params.stop_token_ids == ()
    with pytest.raises(BadRequestError) as refused:
        sdk.completions.create(model=MODEL, prompt="a", suffix="z", echo=True)
    assert refused.value.param == "echo"
    for prompt, size, param in (("a", 512, "suffix"), ("a" * 300, 250, "prompt")):
        with pytest.raises(BadRequestError) as long:
            sdk.completions.create(model=MODEL, prompt=prompt, suffix="z" * size)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", param)


def test_a_model_that_cannot_fill_in_says_so() -> None:
    """A vocabulary without fill-in-the-middle tokens: a 400 with the reason."""
    with (
        serve(tokenizer=ByteTokenizer(fim=False)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        with pytest.raises(BadRequestError) as refused:
            sdk.completions.create(model=MODEL, prompt="a", suffix="z")
        assert refused.value.param == "suffix"
        assert refused.value.code == "unsupported_field"
        assert "fill-in-the-middle" in str(refused.value)
        assert sdk.completions.create(model=MODEL, prompt="a", suffix="").choices


def test_prompt_logprobs_in_vllms_shape() -> None:
    """For every prompt token but the first, each choice has an object from token id to logprob,
    rank and text. Only the first choice of a prompt costs the engine anything."""
    with serve(FakeClient()) as served, served.http() as http:
        body = {"model": MODEL, "prompt": PROMPTS, "n": 2, "max_tokens": 2, "prompt_logprobs": 2}
        reply = http.post(COMPLETIONS, json=body).json()
        rows = [choice["prompt_logprobs"] for choice in reply["choices"]]
        i = {"logprob": HALF, "rank": 1, "decoded_token": "i"}
        j = {"logprob": pytest.approx(2 * math.log(0.5)), "rank": 2, "decoded_token": "j"}
        assert rows == [[None, {"105": i, "106": j}]] * 2 + [[None]] * 2
        assert all(choice["logprobs"] is None for choice in reply["choices"])
        counts = [submit.params.prompt_logprobs for submit in served.client.submitted]
        assert counts == [2, None, 2, None]
        chat = http.post(
            CHAT, json={"model": MODEL, "messages": HELLO, "max_tokens": 2, "prompt_logprobs": 0}
        ).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in chat["choices"][0]


def test_prompt_logprobs_beside_an_echo(served: Served) -> None:
    """Each returns as many alternatives as it asks for; the engine scores the prompt once."""
    body = {
        "model": MODEL, "prompt": [104, 105], "max_tokens": 1, "echo": True, "logprobs": 1,
        "prompt_logprobs": 3,
    }  # fmt: skip
    choice = httpx.post(f"{served.url}{COMPLETIONS}", json=body).json()["choices"][0]
    assert served.client.submitted[-1].params.prompt_logprobs == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1
    assert len(choice["prompt_logprobs"][1]) == 3
    echo_only = {**body, "logprobs": None}
    choice = httpx.post(f"{served.url}{COMPLETIONS}", json=echo_only).json()["choices"][0]
    assert choice["logprobs"] is None
    assert choice["text"].startswith("hi")


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_prompt_logprobs_are_not_streamed(served: Served, route: str) -> None:
    """As in vLLM, the combination is refused."""
    prompt: dict[str, Any] = {"prompt": "a"} if route == COMPLETIONS else {"messages": HELLO}
    body = {"model": MODEL, **prompt, "stream": True, "prompt_logprobs": 0}
    error = httpx.post(f"{served.url}{route}", json=body).json()["error"]
    assert error["param"] == "prompt_logprobs"


def test_token_ids_of_a_completion() -> None:
    """There are as many ids as the usage counts: the end-of-text token, and those of a stop string
    up to the one that completes it. A stream's ids add up to the same."""
    script = listed_script(list(b"one two three"), then=257)
    with (
        serve(FakeClient(script=script, tokens_per_step=4)) as served,
        served.http() as http,
    ):
        for stop, expected in ((None, [*b"one two three", 257]), ("two", [*b"one two"])):
            body = {
                "model": MODEL, "prompt": [7, 8], "max_tokens": 99, "return_token_ids": True,
                "stop": stop,
            }  # fmt: skip
            reply = http.post(COMPLETIONS, json=body).json()
            [choice] = reply["choices"]
            assert choice["token_ids"] == expected
            assert choice["prompt_token_ids"] == [7, 8]
            assert reply["usage"]["completion_tokens"] == len(expected)
            chunks = chunks_of(http.post(COMPLETIONS, json={**body, "stream": True}))
            choices = [chunk["choices"][0] for chunk in chunks]
            assert choices[0]["prompt_token_ids"] == [7, 8]
            assert all("prompt_token_ids" not in choice for choice in choices[1:])
            assert [i for choice in choices for i in choice.get("token_ids", [])] == expected


def test_token_ids_of_a_chat(served: Served) -> None:
    """Prompt ids are beside the choices, as in vLLM; in a stream, on its first chunk."""
    body = {
        "model": MODEL, "messages": HELLO, "max_tokens": 7, "n": 2, "seed": 1,
        "return_token_ids": True,
    }  # fmt: skip
    reply = httpx.post(f"{served.url}{CHAT}", json=body).json()
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    for choice in reply["choices"]:
        assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    chunks = chunks_of(httpx.post(f"{served.url}{CHAT}", json={**body, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice.get("token_ids", [])
    assert [ids[0], ids[1]] == [choice["token_ids"] for choice in reply["choices"]]


def test_extensions_are_left_out_unless_requested(served: Served) -> None:
    """Without these fields a reply has the plain shape."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    [choice] = httpx.post(f"{served.url}{COMPLETIONS}", json=body).json()["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
