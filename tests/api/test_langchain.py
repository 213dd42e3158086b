"""langchain-openai as a client: ChatOpenAI unstreamed, streamed, with tools and with formats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel

from tests.api.test_sdk_helpers import CALL, PERSON, WEATHER, GetWeather, Person
from tests.support.serving import MODEL, serve
from tests.support.tools import scripted


@contextmanager
def chat(text: str, **options: Any) -> Iterator[Any]:
    with serve(scripted(text, tokens_per_step=2)) as served:
        yield ChatOpenAI(
            model=MODEL, base_url=f"{served.url}/v1", api_key="none", max_retries=0, **options
        )


def test_invoke_and_stream() -> None:
    """Text, finish and usage; the chunks add up to the unstreamed reply."""
    with chat("one two three", seed=7, temperature=0.5, stream_usage=True) as model:
        reply = model.invoke([("system", "Be brief."), ("human", "hello")])
        assert reply.content == "one two three"
        assert reply.response_metadata["finish_reason"] == "stop"
        assert reply.usage_metadata["output_tokens"] == 14
        chunks = list(model.stream("hello"))
        assert "".join(chunk.content for chunk in chunks) == reply.content
        assert (
            sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
            == 14
        )
        assert asyncio.run(model.ainvoke("hello")).content == reply.content
        assert [out.content for out in model.batch(["a", "b"])] == [reply.content] * 2


def test_tools() -> None:
    """Bound tools, streamed and not, and the turn in which a result goes back."""
    with chat(f"Let me see.\n{CALL}") as model:
        bound = model.bind_tools([GetWeather])
        reply = bound.invoke("hello")
        [call] = reply.tool_calls
        assert (call["name"], call["args"]) == ("GetWeather", WEATHER)
        assert reply.content == "Let me see."
        streamed = AIMessageChunk("")
        for chunk in bound.stream("hello"):
            streamed = streamed + chunk
        [again] = streamed.tool_calls
        assert (again["name"], again["args"]) == ("GetWeather", WEATHER)
        result = ToolMessage("sunny", tool_call_id=call["id"])
        assert bound.invoke([HumanMessage("hello"), reply, result]).tool_calls
        assert bound.invoke(
            [HumanMessage("hello"), streamed, ToolMessage("x", tool_call_id=again["id"])]
        )


@pytest.mark.parametrize("choice", ["auto", "none", "any", "required", "GetWeather"])
def test_tool_choices(choice: str) -> None:
    """Every way in which langchain spells a tool choice is understood."""
    with chat(CALL) as model:
        bound = model.bind_tools([GetWeather], tool_choice=choice, parallel_tool_calls=False)
        reply = bound.invoke("hello")
        assert bool(reply.tool_calls) == (choice != "none")


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("json_schema", json.dumps(PERSON)),
        ("json_mode", json.dumps(PERSON)),
        (
            "function_calling",
            f'<tool_call>{{"name": "Person", "arguments": {json.dumps(PERSON)}}}</tool_call>',
        ),
    ],
)
# langchain dumps the SDK's parsed completion, whose type says that nothing was parsed.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning:pydantic.main")
@pytest.mark.parametrize("streamed", [False, True])
def test_structured_output(method: str, text: str, streamed: bool) -> None:
    """All three methods of `with_structured_output`."""
    with chat(text) as model:
        structured = model.with_structured_output(Person, method=method)
        if streamed:
            *_, person = structured.stream("hello")
        else:
            person = structured.invoke("hello")
    assert person == Person.model_validate(PERSON)


def test_errors_arrive_as_the_sdk_s() -> None:
    """A refusal names its field through langchain too."""

    class Unused(BaseModel):
        x: int

    with chat("hi", temperature=3) as model, pytest.raises(BadRequestError) as refused:
        model.bind_tools([Unused]).invoke("hello")
    assert refused.value.param == "temperature"


def test_a_full_context_is_told_apart() -> None:
    """langchain has an exception for it, which it recognises by the message."""
    with chat("hi") as model, pytest.raises(ContextOverflowError):
        model.invoke("x" * 20_000)
