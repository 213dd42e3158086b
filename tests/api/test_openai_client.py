"""The official OpenAI client, sync and async, against a real uvicorn: shapes and error classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.support.fake_client import FakeClient, listed_script
from tests.support.serving import MODEL, Served, serve

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
KEY = "sk-a-key"


@pytest.fixture(scope="module")
def sdk(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_completion(sdk: OpenAI) -> None:
    """The whole body in OpenAI's shape, with the seed and the speculation that made it."""
    reply = sdk.completions.create(model=MODEL, prompt="once", max_tokens=7, seed=11)
    assert reply.id.startswith("cmpl-")
    assert reply.object == "text_completion"
    assert reply.model == MODEL
    assert reply.system_fingerprint
    assert reply.created > 1_700_000_000
    [choice] = reply.choices
    assert len(choice.text) == 7
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 5  # BOS and four bytes
    assert reply.usage.completion_tokens == 7
    assert reply.usage.total_tokens == 12
    assert reply.model_extra == {"seed": 11}
    assert reply.usage.model_extra == {
        "speculation": {
            "enabled": True,
            "max_draft": "auto",
            "proposers": ["draft_model"],
            "proposed": 6,
            "accepted": 4,
            "rounds": 3,
            "by_proposer": {"draft_model": {"proposed": 6, "accepted": 4}},
        }
    }
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_the_seed_that_was_drawn_replays_the_reply(sdk: OpenAI) -> None:
    """A reply to a request without a seed reports the seed that was drawn."""
    first = sdk.completions.create(model=MODEL, prompt="once", max_tokens=9)
    assert first.model_extra is not None
    seed = first.model_extra["seed"]
    assert 0 <= seed < 2**53
    again = sdk.completions.create(model=MODEL, prompt="once", max_tokens=9, seed=seed)
    assert again.choices[0].text == first.choices[0].text


def test_chat(sdk: OpenAI) -> None:
    """One assistant message, in OpenAI's shape."""
    reply = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=6)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    [choice] = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert len(choice.message.content) == 6
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_fills_the_context_by_default(served: Served, sdk: OpenAI) -> None:
    """Without max_tokens a chat may use all the context that the prompt leaves."""
    reply = sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert reply.usage is not None
    assert reply.usage.total_tokens == 512
    assert reply.choices[0].finish_reason == "length"


def test_a_reply_can_be_sent_back(sdk: OpenAI) -> None:
    """The SDK's object for our message, nulls included, is a valid message of the next turn."""
    reply = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    answer = reply.choices[0].message.to_dict()
    messages = [*HELLO, answer, *HELLO]
    more = sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)  # type: ignore[arg-type]
    assert more.choices[0].message.content


def test_stream_of_completion_equals_the_whole(sdk: OpenAI) -> None:
    """Streaming changes when text arrives, not which text."""
    whole = sdk.completions.create(model=MODEL, prompt="once", max_tokens=20, seed=3)
    chunks = list(
        sdk.completions.create(model=MODEL, prompt="once", max_tokens=20, seed=3, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].model_extra is not None
    assert chunks[0].model_extra["seed"] == 3
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_stream_of_chat_with_usage(sdk: OpenAI) -> None:
    """The first chunk has the role, the last one usage and no choices; other usages are null."""
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=5,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    whole = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, seed=3)
    assert text == whole.choices[0].message.content


def test_choices_and_prompts_fan_out(served: Served, sdk: OpenAI) -> None:
    """Choice i of prompt p has index p * n + i; choice 0 is that of n=1; a prompt counts once."""
    ids = [[104, 105], [106]]
    reply = sdk.completions.create(model=MODEL, prompt=ids, n=3, max_tokens=8, seed=5)
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 3
    assert reply.usage.completion_tokens == 48
    for i, prompt in enumerate(ids):
        one = sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=8, seed=5)
        assert one.choices[0].text == texts[3 * i]
    chunks = list(
        sdk.completions.create(model=MODEL, prompt=ids, n=3, max_tokens=8, seed=5, stream=True)
    )
    streamed = [""] * 6
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_logprobs_with_echo(sdk: OpenAI) -> None:
    """The prompt comes first, its first token without a logprob; offsets index the text."""
    reply = sdk.completions.create(
        model=MODEL, prompt=[104, 105], echo=True, logprobs=2, max_tokens=3, seed=1
    )
    choice = reply.choices[0]
    assert choice.text.startswith("hi")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1] == pytest.approx(-0.693, abs=1e-3)
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {
        "i": pytest.approx(-0.693, abs=1e-3), "j": pytest.approx(-1.386, abs=1e-3)
    }  # fmt: skip


def test_offsets_of_an_echo_with_special_tokens(sdk: OpenAI) -> None:
    """Bug: special tokens spelled out in a prompt counted as no text, so all later offsets were too
    small. The token that the tokenizer adds in front has no text."""
    reply = sdk.completions.create(
        model=MODEL, prompt="<|im_start|>a<|im_end|>b", echo=True, logprobs=0, max_tokens=1, seed=1
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:-1] == ["<|bos|>", "<|im_start|>", "a", "<|im_end|>", "b"]
    assert logprobs.text_offset == [0, 0, 12, 13, 23, 24]


def test_chat_logprobs(sdk: OpenAI) -> None:
    """token, logprob, bytes and alternatives; streaming gives the same entries."""
    reply = sdk.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, seed=2, logprobs=True, top_logprobs=3
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.message.content is not None
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert [entry.bytes for entry in entries] == [[b] for b in choice.message.content.encode()]
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    streamed = []
    for chunk in sdk.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, seed=2, logprobs=True, top_logprobs=3,
        stream=True,
    ):  # fmt: skip
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs is not None else []
    assert streamed == entries


def test_models(sdk: OpenAI) -> None:
    """The list has the one served model, which can be retrieved by its name."""
    [model] = sdk.models.list().data
    assert model.id == MODEL
    assert sdk.models.retrieve(MODEL).owned_by == "foredraft"


def test_error_classes(served: Served, sdk: OpenAI) -> None:
    """Each refusal arrives as the exception that users of the SDK catch."""
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model=MODEL, prompt="a", temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model=MODEL, prompt=[1] * 600)
    assert long.value.code == "context_length_exceeded"
    served.client.state = "draining"
    try:
        with pytest.raises(openai.InternalServerError) as down:
            sdk.completions.create(model=MODEL, prompt="a")
    finally:
        served.client.state = "ready"
    assert down.value.status_code == 503
    assert down.value.response.headers["retry-after"]


def test_api_key() -> None:
    """With a key configured, /v1 requires it."""
    with serve(api_key=KEY) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key="sk-wrong", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError) as refused:
                wrong.models.list()
            assert refused.value.code == "invalid_api_key"
        with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as right:
            assert right.models.list().data


def test_queue_full() -> None:
    """Beyond max_inflight: 429 at once; a request that could never fit is a 400."""
    gate = asyncio.Semaphore(0)
    with (
        serve(FakeClient(gate=gate), max_inflight=2) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        stream = sdk.completions.create(model=MODEL, prompt="a", stream=True, n=2)
        served.until(lambda: served.client.inflight == 2)
        with pytest.raises(openai.RateLimitError) as full:
            sdk.completions.create(model=MODEL, prompt="a")
        assert full.value.response.headers["retry-after"]
        assert full.value.code == "queue_full"
        with pytest.raises(openai.BadRequestError):
            sdk.completions.create(model=MODEL, prompt="a", n=3)
        stream.close()
        served.until(lambda: served.client.inflight == 0)


def test_async_client(served: Served) -> None:
    """The same through AsyncOpenAI: unstreamed, streamed, many at once, refused."""

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
            wholes = await asyncio.gather(
                *(
                    sdk.completions.create(model=MODEL, prompt="a", max_tokens=9, seed=i)
                    for i in range(8)
                )
            )
            for i, whole in enumerate(wholes):
                stream = await sdk.completions.create(
                    model=MODEL, prompt="a", max_tokens=9, seed=i, stream=True
                )
                text = "".join([chunk.choices[0].text async for chunk in stream])
                assert text == whole.choices[0].text
            with pytest.raises(openai.BadRequestError):
                await sdk.chat.completions.create(model=MODEL, messages=[])

    asyncio.run(main())


def test_stop_strings_and_end_of_text() -> None:
    """Both finish with "stop"; a stop string is cut from the text, but its tokens are counted."""
    script = listed_script(list(b"one two three"), then=257)
    with (
        serve(FakeClient(script=script, tokens_per_step=4)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        whole = sdk.completions.create(model=MODEL, prompt="a", max_tokens=99)
        assert whole.choices[0].text == "one two three"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 14  # the end-of-text token counts
        cut = sdk.completions.create(model=MODEL, prompt="a", max_tokens=99, stop="two")
        assert cut.choices[0].text == "one "
        assert cut.choices[0].finish_reason == "stop"
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 7
        served.until(lambda: len(served.client.aborted) == 1)
