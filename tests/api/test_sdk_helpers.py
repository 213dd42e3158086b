"""The official SDK's own helpers as clients: `parse`, `stream`, and their async twins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.support.serving import MODEL, serve
from tests.support.tools import scripted

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    name: str
    age: int
    hobbies: list[str]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(description="its name")
    days: int


PERSON = {"name": "Ada", "age": 36, "hobbies": ["mathematics", "poetry"]}
WEATHER = {"city": "Zürich", "days": 2}
CALL = (
    '<tool_call>{"name": "GetWeather", "arguments": '
    f"{json.dumps(WEATHER, ensure_ascii=False)}}}</tool_call>"
)
TOOLS = [pydantic_function_tool(GetWeather)]


@contextmanager
def client(text: str) -> Iterator[OpenAI]:
    with (
        serve(scripted(text, tokens_per_step=2)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


def test_parse_a_response_format() -> None:
    """A pydantic class as the format: the reply arrives as its instance."""
    with client(json.dumps(PERSON)) as sdk:
        reply = sdk.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Person)
    assert reply.choices[0].message.parsed == Person.model_validate(PERSON)


def test_parse_tools() -> None:
    """A pydantic class as a tool: the arguments arrive as its instance."""
    with client(CALL) as sdk:
        reply = sdk.chat.completions.parse(model=MODEL, messages=HELLO, tools=TOOLS)
    [call] = reply.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather.model_validate(WEATHER)
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_reply_cut_short_is_the_helper_s_own_exception() -> None:
    """The helper refuses to parse a reply cut by "length", and its exception says so."""
    with client(json.dumps(PERSON)) as sdk, pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Person, max_completion_tokens=9
        )


def test_stream_text() -> None:
    """Deltas, the done event and the final completion agree."""
    with (
        client("one two three") as sdk,
        sdk.chat.completions.stream(model=MODEL, messages=HELLO, logprobs=True) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion()
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    [done] = [event for event in events if event.type == "content.done"]
    assert deltas == done.content == final.choices[0].message.content == "one two three"
    entries = final.choices[0].logprobs
    assert entries is not None
    assert "".join(entry.token for entry in entries.content or ()) == "one two three"


def test_stream_a_response_format() -> None:
    """Partial JSON parses during the stream, and the whole at its end."""
    with (
        client(json.dumps(PERSON)) as sdk,
        sdk.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Person) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion()
    [done] = [event for event in events if event.type == "content.done"]
    assert done.parsed == Person.model_validate(PERSON) == final.choices[0].message.parsed
    partial = [event.parsed for event in events if event.type == "content.delta"]
    assert {"name": "Ada"} in partial


def test_stream_tools() -> None:
    """Two calls after text: arguments delta by delta, one done event each, the usage at the end."""
    with (
        client(f"Let me see.\n{CALL}\n{CALL.replace('2', '3')}") as sdk,
        sdk.chat.completions.stream(
            model=MODEL, messages=HELLO, tools=TOOLS, stream_options={"include_usage": True}
        ) as stream,
    ):
        events = list(stream)
        final = stream.get_final_completion()
    deltas: dict[int, str] = {}
    for event in events:
        if event.type == "tool_calls.function.arguments.delta":
            deltas[event.index] = deltas.get(event.index, "") + event.arguments_delta
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [deltas[event.index] for event in done] == [event.arguments for event in done]
    assert [event.parsed_arguments for event in done] == [
        GetWeather(city="Zürich", days=2),
        GetWeather(city="Zürich", days=3),
    ]
    message = final.choices[0].message
    assert message.content == "Let me see."
    assert len(message.tool_calls or ()) == 2
    assert final.usage is not None
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_call_round() -> None:
    """The SDK's own message objects go back into the next request unchanged."""
    with client(CALL) as sdk:
        reply = sdk.chat.completions.parse(model=MODEL, messages=HELLO, tools=TOOLS)
        message = reply.choices[0].message
        [call] = message.tool_calls or []
        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages: list[Any] = [*HELLO, message, answer]
        again = sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert again.choices[0].finish_reason == "tool_calls"


def test_async_twins() -> None:
    """The same through AsyncOpenAI, concurrently."""

    async def parse(sdk: AsyncOpenAI) -> None:
        reply = await sdk.chat.completions.parse(model=MODEL, messages=HELLO, tools=TOOLS)
        [call] = reply.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather.model_validate(WEATHER)

    async def stream(sdk: AsyncOpenAI) -> None:
        async with sdk.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as stream:
            types = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in types
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather.model_validate(WEATHER)

    async def main(url: str) -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            await asyncio.gather(*(job(sdk) for job in (parse, stream) * 4))

    with serve(scripted(CALL, tokens_per_step=3)) as served:
        asyncio.run(main(f"{served.url}/v1"))


def test_async_response_format() -> None:
    """A pydantic class as the format, unstreamed and streamed."""

    async def main(url: str) -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            reply = await sdk.chat.completions.parse(
                model=MODEL, messages=HELLO, response_format=Person
            )
            assert reply.choices[0].message.parsed == Person.model_validate(PERSON)
            async with sdk.chat.completions.stream(
                model=MODEL, messages=HELLO, response_format=Person
            ) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.parsed == Person.model_validate(PERSON)

    with serve(scripted(json.dumps(PERSON))) as served:
        asyncio.run(main(f"{served.url}/v1"))
