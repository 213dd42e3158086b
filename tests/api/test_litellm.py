"""litellm as a client: completion, streams, tools and errors, sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.test_sdk_helpers import CALL, PERSON, TOOLS, WEATHER, Person
from tests.support.serving import MODEL, serve
from tests.support.tools import scripted

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """Import litellm with its own price list, which it would otherwise fetch over the network, and
    with an event loop, since it would make one and never close it, which failed the next test."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        yield litellm
    asyncio.set_event_loop(None)
    loop.close()


def options(url: str, **fields: Any) -> dict[str, Any]:
    named = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    return {**named, "messages": HELLO, "num_retries": 0, **fields}


def test_completion(litellm: Any) -> None:
    """Unstreamed and streamed, with OpenAI's fields and with ours."""
    with serve(scripted("one two three", tokens_per_step=2)) as served:
        fields = options(served.url, seed=3, temperature=0.5, extra_body={"top_k": 5})
        reply = litellm.completion(**fields)
        assert reply.choices[0].message.content == "one two three"
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.completion_tokens == 14
        assert served.client.submitted[-1].params.top_k == 5
        chunks = list(litellm.completion(**fields, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "one two three"


def test_async_completion(litellm: Any) -> None:
    """acompletion, unstreamed and streamed, concurrently."""

    async def main(url: str) -> None:
        async def streamed() -> str:
            stream = await litellm.acompletion(**options(url), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        reply, text = await asyncio.gather(litellm.acompletion(**options(url)), streamed())
        assert reply.choices[0].message.content == text == "one two three"

    with serve(scripted("one two three")) as served:
        asyncio.run(main(served.url))


def test_tools(litellm: Any) -> None:
    """Calls, unstreamed and streamed; a result goes back; a tool choice is understood."""
    with serve(scripted(f"Let me see.\n{CALL}")) as served:
        fields = options(served.url, tools=TOOLS)
        message = litellm.completion(**fields).choices[0].message
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == WEATHER
        assert message.content == "Let me see."
        whole = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))
        [again] = whole.choices[0].message.tool_calls
        assert (again.function.name, json.loads(again.function.arguments)) == (
            "GetWeather",
            WEATHER,
        )
        assert whole.choices[0].finish_reason == "tool_calls"
        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        fields["messages"] = [*HELLO, message, answer]
        choice = {"type": "function", "function": {"name": "GetWeather"}}
        assert litellm.completion(**fields, tool_choice=choice).choices[0].message.tool_calls


def test_response_format(litellm: Any) -> None:
    """A pydantic class as the format."""
    with serve(scripted(json.dumps(PERSON))) as served:
        reply = litellm.completion(**options(served.url, response_format=Person))
    assert Person.model_validate_json(reply.choices[0].message.content).name == "Ada"


def test_errors(litellm: Any) -> None:
    """Refusals arrive as litellm's own exceptions."""
    with serve(scripted("hi")) as served:
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            litellm.completion(**options(served.url, temperature=3))
        for text in ("x" * 20_000, "x" * 900_000):  # too many tokens; too many to be tokenised
            fields = options(served.url, messages=[{"role": "user", "content": text}])
            with pytest.raises(litellm.ContextWindowExceededError):  # recognised by the message
                litellm.completion(**fields)
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(**options(served.url, model="openai/other"))
