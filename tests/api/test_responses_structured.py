"""Structured text and enforced calls through /v1/responses: the SDK's helpers, chat's grammars."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.support.response_stream_rules import read_response
from tests.support.responses import RESPONSES
from tests.support.serving import MODEL, Served, serve
from tests.support.tools import scripted


class Person(BaseModel):
    name: str
    age: int


class LookUp(BaseModel):
    """Find a person."""

    name: str


PERSON = Person(name="Zoë", age=36)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = '<tool_call>{"name": "LookUp", "arguments": {"name": "Zoë"}}</tool_call>'
FLAT = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}
NESTED = {
    "type": "function",
    "function": {"name": "look_up", "parameters": SCHEMA, "strict": True},
}


@pytest.fixture(scope="module")
def served() -> Any:
    """One server for all: each starts a child process to compile grammars."""
    with serve(scripted("x")) as served:
        yield served


def tool_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a strict function tool in this API's flat shape."""
    return {"type": "function", **pydantic_function_tool(model)["function"]}


def test_parse() -> None:
    """`responses.parse` with a pydantic class, sync, async and streamed; the engine gets the
    class's schema as a grammar."""
    with serve(scripted(PERSON.model_dump_json(), tokens_per_step=2)) as served:
        url = f"{served.url}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            reply = sdk.responses.parse(model=MODEL, input="who?", text_format=Person)
            assert reply.output_parsed == PERSON
            assert reply.status == "completed"
            with sdk.responses.stream(model=MODEL, input="who?", text_format=Person) as stream:
                done = [e for e in stream if e.type == "response.output_text.done"]
                assert stream.get_final_response().output_parsed == PERSON
            assert [event.parsed for event in done] == [PERSON]

        async def twins() -> None:
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
                reply = await sdk.responses.parse(model=MODEL, input="who?", text_format=Person)
                assert reply.output_parsed == PERSON
                fields: Any = {"model": MODEL, "input": "who?", "text_format": Person}
                async with sdk.responses.stream(**fields) as stream:
                    final = await stream.get_final_response()
                assert final.output_parsed == PERSON

        asyncio.run(twins())
        for submit in served.client.submitted:
            assert submit.params.grammar is not None
            assert submit.params.grammar.kind == "json_schema"
            assert set(json.loads(submit.params.grammar.source)["properties"]) == {"name", "age"}


def test_parse_tools() -> None:
    """A pydantic class as a tool: its call arrives, and goes back with the result."""
    tools: Any = [tool_of(LookUp)]
    with serve(scripted(CALL, tokens_per_step=2)) as served:
        sdk: Any = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with sdk:
            reply = sdk.responses.parse(model=MODEL, input="who?", tools=tools)
            [call] = reply.output
            assert (call.type, json.loads(call.arguments)) == ("function_call", {"name": "Zoë"})
            with sdk.responses.stream(model=MODEL, input="who?", tools=tools) as stream:
                kinds = {event.type for event in stream}
                final = stream.get_final_response()
            assert "response.function_call_arguments.delta" in kinds
            assert json.loads(final.output[0].arguments) == {"name": "Zoë"}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "36"}
            conversation = [{"role": "user", "content": "who?"}, *reply.output, result]
            again = sdk.responses.create(model=MODEL, input=conversation, tools=tools)
            assert again.output


def test_a_parsed_reply_can_be_sent_back() -> None:
    """What `parse` adds to the items for its caller does no harm when they are sent back."""
    with serve(scripted(PERSON.model_dump_json())) as served:
        sdk: Any = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with sdk:
            reply = sdk.responses.parse(model=MODEL, input="who?", text_format=Person)
            conversation = [{"role": "user", "content": "who?"}, *reply.output]
            more = sdk.responses.create(
                model=MODEL, input=[*conversation, {"role": "user", "content": "and?"}]
            )
            assert more.output_text


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        },
    ),
    ({"structured_outputs": {"regex": "[ab]+"}}, {"structured_outputs": {"regex": "[ab]+"}}),
    ({"tools": [FLAT]}, {"tools": [NESTED]}),
    ({"tools": [FLAT], "tool_choice": "none"}, {"tools": [NESTED], "tool_choice": "none"}),
    ({"tools": [FLAT], "tool_choice": "required"}, {"tools": [NESTED], "tool_choice": "required"}),
    (
        {"tools": [FLAT], "tool_choice": {"type": "function", "name": "look_up"}},
        {
            "tools": [NESTED],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        },
    ),
    (
        {
            "tools": [FLAT],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look_up"}],
            },
        },
        {
            "tools": [NESTED],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look_up"}}],
                },
            },
        },
    ),
    (
        {"tools": [FLAT], "parallel_tool_calls": False},
        {"tools": [NESTED], "parallel_tool_calls": False},
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME)
def test_grammars_equal_chats(served: Served, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Law: one constraint in either API's words gives the same prompt and the same grammar."""
    common = {"model": MODEL, "seed": 1}
    response = httpx.post(
        f"{served.url}{RESPONSES}", json={**common, "input": "hi", **ours}, timeout=30
    )
    chat = httpx.post(
        f"{served.url}/v1/chat/completions",
        json={**common, "messages": [{"role": "user", "content": "hi"}], **theirs},
        timeout=30,
    )
    assert (response.status_code, chat.status_code) == (200, 200), response.text
    first, second = served.client.submitted[-2:]
    assert (first.prompt, first.params) == (second.prompt, second.params)
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        if name in ours:
            assert response.json()[name] == ours[name]
    if "text" in ours:
        assert response.json()["text"]["format"] == ours["text"]["format"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"pattern": "(?=a)b"}}}},
        "text.format.schema",
    ),
    (
        {
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "n",
                    "schema": {"type": "object", "propertyNames": {"pattern": "(?<=a)b"}},
                }
            }
        },
        "text.format.schema",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"tools": [{**FLAT, "parameters": {"type": "object", "not": {}}}]}, "tools[0].parameters"),
    (
        {"tools": [FLAT], "tool_choice": {"type": "function", "name": "other"}},
        "tool_choice.name",
    ),
    (
        {
            "tools": [FLAT],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "other"}],
            },
        },
        "tool_choice.tools",
    ),
    ({"tools": [FLAT, FLAT]}, "tools[1].name"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals_name_this_apis_fields(served: Served, fields: dict[str, Any], param: str) -> None:
    """This includes errors that only the grammar compiler finds."""
    body = {"model": MODEL, "input": "hi", **fields}
    reply = httpx.post(f"{served.url}{RESPONSES}", json=body, timeout=30)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert "response_format" not in error["message"]
    assert ".function" not in error["message"]
    streamed = httpx.post(f"{served.url}{RESPONSES}", json={**body, "stream": True}, timeout=30)
    assert streamed.json()["error"] == error


def test_a_required_call_in_a_stream() -> None:
    """With tool_choice required the Response has calls and no message."""
    call = '<tool_call>{"name": "look_up", "arguments": {"a": "b"}}</tool_call>'
    with serve(scripted(call, tokens_per_step=4)) as served:
        body = {
            "model": MODEL,
            "input": "hi",
            "tools": [FLAT],
            "tool_choice": "required",
            "stream": True,
        }
        reply = httpx.post(f"{served.url}{RESPONSES}", json=body, timeout=30)
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    response = read_response(json.loads(line.removeprefix("data: ")) for line in lines)
    [item] = response["output"]
    assert (item["type"], item["name"], item["arguments"]) == (
        "function_call",
        "look_up",
        '{"a": "b"}',
    )
    assert response["status"] == "completed"
