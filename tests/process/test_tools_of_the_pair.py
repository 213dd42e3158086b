"""Tools and clients on the real engine with the built-in pair, as a newcomer uses them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from tests.support.documents import section
from tests.support.tools import accumulated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "foredraft-demo"
HELLO: list[Any] = [{"role": "user", "content": "Tell me something."}]


class Book(BaseModel):
    """Book a journey. So bounded that any seed on any machine comes to an end."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    days: int = Field(ge=0, le=99)
    friends: list[bool] = Field(max_length=4)


class Stop(BaseModel):
    """Say no more."""


TOOLS: list[Any] = [pydantic_function_tool(Book), pydantic_function_tool(Stop, name="stop")]


@pytest.fixture
def sdk(pair_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pair_url}/v1", api_key="none", max_retries=0, timeout=300) as sdk:
        yield sdk


def test_the_examples_of_the_readme(pair_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They print what the README says: a call by a model that learned to call, and its use."""
    console, python = re.findall(r"```\w+\n(.*?)```", section("tools"), re.DOTALL)
    reply = httpx.post(
        f"{pair_url}/v1/chat/completions", json=json.loads(console.split("'")[3]), timeout=300
    )
    [call] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    exec(python.replace("http://127.0.0.1:8000", pair_url), {})
    assert capsys.readouterr().out.splitlines() == [
        'get_weather {"city": "Rome"}',
        "It is 21 degrees in Rome.",
    ]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def check(name: str, arguments: str) -> None:
    if name == "Book":
        Book.model_validate_json(arguments, strict=True)
    else:
        assert (name, arguments) == ("stop", "{}")


@pytest.mark.parametrize("choice", ["required", "Book", "auto"])
def test_tool_calls_satisfy_their_schemas(sdk: OpenAI, choice: str) -> None:
    """At temperature 1.5 a model of this size makes no valid call by itself; here every call
    satisfies its schema, and a stream with the same seed says the same."""
    named = {"type": "function", "function": {"name": choice}}
    fields: dict[str, Any] = {
        "model": MODEL, "messages": HELLO, "tools": TOOLS, "n": 6, "max_tokens": 300, "seed": 1,
        "tool_choice": named if choice == "Book" else choice, "temperature": 1.5,
        "parallel_tool_calls": False,
    }  # fmt: skip
    wholes = sdk.chat.completions.create(**fields).choices
    streamed = accumulated(sdk.chat.completions.create(**fields, stream=True))
    for whole, other in zip(wholes, streamed, strict=True):
        made = calls_of(whole.message)
        assert whole.finish_reason == other["finish"]
        assert (whole.message.content or "") == other["content"]
        assert [(name, arguments) for _, name, arguments in other["calls"]] == made
        if whole.finish_reason != "length":
            for name, arguments in made:
                check(name, arguments)
        assert len(made) <= 1
        if choice != "auto":
            assert len(made) == 1
            assert whole.message.content is None
            assert whole.finish_reason == "tool_calls"


def test_a_format_beside_tools(sdk: OpenAI) -> None:
    """A reply is calls or the format, never anything else."""
    for seed in range(6):
        reply = sdk.chat.completions.parse(
            model=MODEL, messages=HELLO, tools=TOOLS, response_format=Book, max_tokens=400,
            seed=seed, parallel_tool_calls=False,
        )  # fmt: skip
        message = reply.choices[0].message
        if message.tool_calls:
            for call in message.tool_calls:
                check(call.function.name, call.function.arguments)
        else:
            assert isinstance(message.parsed, Book)


def test_langchain(pair_url: str) -> None:
    """The ways to structured output, on a model and a grammar instead of a script."""
    model: Any = ChatOpenAI(
        model=MODEL,
        base_url=f"{pair_url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=400,
        seed=3,
    )
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Book, method=method).invoke("Where to?")
        assert isinstance(found, Book)
    bound = model.bind_tools([Book], tool_choice="any")
    [call] = bound.invoke("Where to?").tool_calls[:1]
    Book.model_validate(call["args"])


def test_litellm(pair_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A required call through litellm, unstreamed and streamed with the same seed."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    import litellm

    fields: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": f"{pair_url}/v1", "api_key": "none", "seed": 5,
        "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = litellm.completion(**fields)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))
    for reply in (whole, streamed):
        made = calls_of(reply.choices[0].message)
        assert made
        for name, arguments in made:
            check(name, arguments)
    assert calls_of(whole.choices[0].message) == calls_of(streamed.choices[0].message)
