"""Tools through the official SDK: offered, called, streamed, and enforced by grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.serving import MODEL, Served, serve
from tests.support.tools import CALLS, CITY, HELLO, TOOLS, accumulated, scripted, tool

CHAT = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def saying_hi() -> Iterator[Served]:
    """One server for all: each starts a child process to compile grammars."""
    with serve(scripted("hi")) as served:
        yield served


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7, 500])
def test_streamed_and_whole_replies_say_the_same(tokens_per_step: int) -> None:
    """Content, calls and finish agree, whatever the tokens per step; each reply has its own ids."""
    with (
        serve(scripted(CALLS, tokens_per_step=tokens_per_step)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        whole = sdk.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, n=2)
        chunks = sdk.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, n=2, stream=True
        )
        streamed = accumulated(chunks)
    ids = set()
    for choice, state in zip(whole.choices, streamed, strict=True):
        assert choice.message.content == "Let me see." == state["content"]
        assert choice.finish_reason == "tool_calls" == state["finish"]
        calls = [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
            if call.type == "function"
        ]
        assert calls == [("get_weather", '{"city": "Zürich"}'), ("get_time", '{"city": "Rome"}')]
        assert [tuple(call[1:]) for call in state["calls"]] == calls
        ids |= {call.id for call in choice.message.tool_calls or ()}
        ids |= {call[0] for call in state["calls"]}
    assert len(ids) == 8


def test_arguments_stream_while_they_are_written() -> None:
    """At one token per step, an argument of several characters takes several chunks."""
    with (
        serve(scripted(CALLS)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        pieces = [
            choice.delta.tool_calls[0].function.arguments
            for chunk in sdk.chat.completions.create(
                model=MODEL, messages=HELLO, tools=TOOLS, stream=True
            )
            for choice in chunk.choices
            if choice.delta.tool_calls and choice.delta.tool_calls[0].function
        ]
    assert len(pieces) > 20
    assert all(piece is not None and len(piece) <= 1 for piece in pieces)


def test_a_reply_without_a_call_is_as_without_tools() -> None:
    """Text, white space at both ends and half a tag are all content; the finish is "stop"."""
    text = " \n a <tool_call> that is none, and <tool \n"
    with serve(scripted(text)) as served, served.http() as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        [choice] = http.post(CHAT, json=body).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_a_call_cut_by_the_length() -> None:
    """The arguments so far arrive, and the finish is "length"."""
    with serve(scripted(CALLS)) as served, served.http() as http:
        size = CALLS.encode().index(b"rich")
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "max_tokens": size}
        [choice] = http.post(CHAT, json=body).json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zü'}
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("cut", [{"stop": "name"}, {"max_tokens": 5}])
def test_half_a_call_that_was_required_is_no_content(choice: Any, cut: dict[str, Any]) -> None:
    """Bug: a stop string within the tag of a required call left `<tool_call>{"` as content."""
    call = '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>'
    with serve(scripted(call)) as served, served.http() as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": choice, **cut}
        [reply] = http.post(CHAT, json=body).json()["choices"]
        assert reply["message"] == {"role": "assistant", "content": "", "refusal": None}
        assert reply["finish_reason"] == ("stop" if "stop" in cut else "length")


def test_logprobs_of_calls() -> None:
    """Entries cover the generated text, calls and tags included, streamed or not."""
    with serve(scripted(CALLS, tokens_per_step=3)) as served:
        body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "logprobs": True}
        with served.http() as http:
            [choice] = http.post(CHAT, json=body).json()["choices"]
            text = http.post(CHAT, json={**body, "stream": True}).text
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == CALLS.encode()
    streamed: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            logprobs = json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]
            streamed += logprobs["content"] if logprobs else []
    assert streamed == entries


def test_a_stop_string_sees_the_text_as_it_was_written() -> None:
    """A stop string may match a call's tag and so end the reply between two calls."""
    with serve(scripted(CALLS)) as served, served.http() as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "stop": "</tool_call>"}
        [choice] = http.post(CHAT, json=body).json()["choices"]
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
        assert choice["finish_reason"] == "tool_calls"


def test_the_prompt_lists_tools_unless_tool_choice_is_none() -> None:
    """With tool_choice "none" the prompt has no tools, and what looks like a call is text."""
    with serve(scripted(CALLS)) as served, served.http() as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        http.post(CHAT, json=body)
        prompt = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
        assert "get_weather" in prompt
        [choice] = http.post(CHAT, json={**body, "tool_choice": "none"}).json()["choices"]
        prompt = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
        assert "get_weather" not in prompt
        assert choice["message"]["content"] == CALLS
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "auto",
        "tools": [{"type": "function", "function": {"name": "get_time"}}],
    },
}


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, False),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, False),
        ({"tool_choice": "none", "parallel_tool_calls": False}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED}, True),
        ({"tool_choice": ALLOWED}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [tool(strict=True)]}, True),
    ],
)
def test_constraints_become_grammars(saying_hi: Served, fields: dict[str, Any], held: bool) -> None:
    """A constraint that the model alone might break is enforced; otherwise there is no grammar."""
    body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, **fields}
    assert httpx.post(saying_hi.url + CHAT, json=body, timeout=30).is_success
    grammar = saying_hi.client.submitted[-1].params.grammar
    assert (grammar is not None) == held
    if grammar is not None and "tool_choice" in fields and fields["tool_choice"] != "required":
        assert "get_time" in grammar.source
        assert "get_weather" not in grammar.source


def test_only_allowed_tools_are_read_as_calls() -> None:
    """The prompt lists all tools, so that it stays cacheable, but only these may be called."""
    with serve(scripted(CALLS)) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": ALLOWED}
        [choice] = httpx.post(served.url + CHAT, json=body, timeout=30).json()["choices"]
        prompt = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
    assert "get_weather" in prompt
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_time"]


ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY, "strict": True}}


def test_a_format_beside_tools(saying_hi: Served) -> None:
    """One grammar allows calls or an answer in the format. If calls are required, there is no
    answer to constrain."""
    client, url = saying_hi.client, saying_hi.url + CHAT
    body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "response_format": ANSWER}
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        assert httpx.post(url, json={**body, **fields}, timeout=30).is_success
        grammar = client.submitted[-1].params.grammar
        assert grammar is not None
        assert grammar.source.startswith("start: content | ")
    for choice, start in (("required", 'start: "<tool_call>" body'), ("none", "{")):
        assert httpx.post(url, json={**body, "tool_choice": choice}, timeout=30).is_success
        grammar = client.submitted[-1].params.grammar
        assert grammar is not None
        assert grammar.source.startswith(start)
    del body["response_format"]
    refused = httpx.post(url, json={**body, "structured_outputs": {"regex": "a+"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs"


HARD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool(), tool("hard", parameters=HARD, strict=True)], "tools[1].function.parameters"),
        ([tool("hard", parameters=HARD, strict=True)], "tools[0].function.parameters"),
    ],
)
def test_strict_schemas_are_honoured_or_refused(saying_hi: Served, tools: Any, param: str) -> None:
    """A strict schema is never enforced in part: a tool that cannot be enforced is named."""
    body = {"model": MODEL, "messages": HELLO, "tools": tools}
    reply = httpx.post(saying_hi.url + CHAT, json=body, timeout=30)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert "`properties.a.not`" in reply.json()["error"]["message"]


def test_a_schema_that_is_not_strict_is_a_hint(saying_hi: Served) -> None:
    """What cannot be enforced of the schema is dropped; calls and other schemas still are."""
    tools = [tool("hard", parameters=HARD), tool(strict=True)]
    body = {"model": MODEL, "messages": HELLO, "tools": tools, "tool_choice": "required"}
    assert httpx.post(saying_hi.url + CHAT, json=body, timeout=30).is_success
    grammar = saying_hi.client.submitted[-1].params.grammar
    assert grammar is not None
    assert "not" not in grammar.source
    assert '"city"' in grammar.source
