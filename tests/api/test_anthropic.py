"""/v1/messages, Anthropic's form of the chat endpoint: text, blocks, events, stops, errors."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from msgspec import structs

from engine.messages import Output, Submit
from server.engine.mailbox import Stream
from tests.api.test_fields import CUSTOM
from tests.support.byte_tokenizer import EOS
from tests.support.fake_client import FakeClient, listed_script, make_ready
from tests.support.message_stream_rules import events_of, read_message
from tests.support.serving import MODEL, Served, serve
from tests.support.tools import CALLS, CITY, scripted

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hello"}
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 7, "seed": 3}
TEXT = {"type": "text", "text": "a"}
USE = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Zürich", "n": 1}}
OTHER = {"type": "tool_use", "id": "t2", "name": "look_up", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT]}
ANSWERED = [{"role": "user", "content": [RESULT]}]
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}


def call(id: str, city: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": json.dumps(city)}
    return {"id": id, "type": "function", "function": function}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"messages": [USER]}, {"messages": [USER]}),
        (
            {"messages": [USER], "system": [TEXT, {**TEXT, "cache_control": {"type": "e"}}]},
            {"messages": [{"role": "system", "content": "a\na"}, USER]},
        ),
        (
            {"messages": [USER, {"role": "user", "content": [TEXT, TEXT]}]},
            {"messages": [{"role": "user", "content": "hello\na\na"}]},
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [TEXT, USE, OTHER]},
                    {
                        "role": "user",
                        "content": [
                            {**RESULT, "is_error": True}, {**RESULT, "tool_use_id": "t2"}, TEXT,
                        ],
                    },
                ],
                "tools": CUSTOM,
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": "a",
                        "tool_calls": [call("t1", {"city": "Zürich", "n": 1}), call("t2", {})],
                    },
                    {"role": "tool", "tool_call_id": "t1", "content": "a"},
                    {"role": "tool", "tool_call_id": "t2", "content": "a"},
                    {"role": "user", "content": "a"},
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "look_up", "parameters": {"type": "object"}},
                    }
                ],
                "parallel_tool_calls": False,
            },
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "and "}]},
            {
                "messages": [USER, {"role": "assistant", "content": "and "}],
                "continue_final_message": True,
            },
        ),
    ],
)  # fmt: skip
def test_replies_equal_those_of_chat(
    served: Served, http: httpx.Client, body: dict[str, Any], chat: dict[str, Any]
) -> None:
    """Law: prompt, parameters, text and usage equal those of the equivalent chat request, and
    count_tokens counts that prompt."""
    fields: dict[str, Any] = {"model": MODEL, "seed": 5, "temperature": 0.7, "top_k": 5}
    message = http.post(MESSAGES, json={**fields, **body, "max_tokens": 9}).json()
    ours = served.client.submitted[-1]
    completion = http.post(CHAT, json={**fields, **chat, "max_tokens": 9}).json()
    theirs = served.client.submitted[-1]
    assert (ours.prompt, ours.params) == (theirs.prompt, theirs.params)
    [block] = message["content"]
    assert block == {"type": "text", "text": completion["choices"][0]["message"]["content"]}
    usage = message["usage"]
    assert usage["speculation"] == completion["usage"]["speculation"]
    assert usage["output_tokens"] == completion["usage"]["completion_tokens"]
    counted = http.post(COUNT, json={"model": MODEL, **body}).json()
    assert counted == {"input_tokens": len(ours.prompt)}
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ours.prompt)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 500])
@pytest.mark.parametrize("more", [{}, {"provenance": True, "return_token_ids": True}])
def test_a_stream_adds_up(tokens_per_step: int, more: dict[str, Any]) -> None:
    """Law: the events are in order and add up to the unstreamed message, text and calls, whatever
    the number of tokens per step."""
    body = {**BODY, **more, "tools": CUSTOM, "max_tokens": 400}
    calls = CALLS.replace("get_weather", "look_up").replace("get_time", "look_up")
    with serve(scripted(calls, tokens_per_step=tokens_per_step)) as served:
        whole = httpx.post(f"{served.url}{MESSAGES}", json=body).json()
        reply = httpx.post(f"{served.url}{MESSAGES}", json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    streamed = read_message(events_of(reply.text))
    assert [block.pop("id", "")[:5] for block in whole["content"]] == ["", "call_", "call_"]
    for block in streamed["content"]:
        block.pop("id", None)
    assert {**streamed, "id": 0} == {**whole, "id": 0}
    assert streamed["stop_reason"] == "tool_use"
    assert [block.get("input") for block in streamed["content"]] == [
        None, {"city": "Zürich"}, {"city": "Rome"}
    ]  # fmt: skip
    assert ("provenance" in streamed, "token_ids" in streamed) == (bool(more), bool(more))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("one two", {}, "end_turn", None),
        ("", {}, "end_turn", None),
        ("one two", {"max_tokens": 3}, "max_tokens", None),
        ("one two", {"stop_sequences": ["x", " t"]}, "stop_sequence", " t"),
        ("one " * 600, {"max_tokens": 9000}, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(
    text: str, fields: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    """Law: stop reasons are Anthropic's; a `max_tokens` beyond the context ends at the context."""
    ready = make_ready(eos_ids=[EOS])
    script = listed_script(list(text.encode()), then=EOS)
    client = FakeClient(script=script, ready=ready, tokens_per_step=2)
    body = {**BODY, "max_tokens": 300, **fields, "stream": stream}
    with serve(client) as served:
        reply = httpx.post(f"{served.url}{MESSAGES}", json=body)
    message = read_message(events_of(reply.text)) if stream else reply.json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    [block] = message["content"]
    assert block["type"] == "text"
    assert text.startswith(block["text"])


def test_a_schema_constrains_the_text() -> None:
    """`output_config.format`, as the SDK's `parse` sends it, becomes a grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    with serve() as served:
        httpx.post(f"{served.url}{MESSAGES}", json={**BODY, "output_config": config})
        grammar = served.client.submitted[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)


@pytest.mark.parametrize(
    ("choice", "tells", "held"),
    [("auto", True, False), ("none", False, False), ("any", True, True), ("tool", True, True)],
)
def test_tool_choice(choice: str, tells: bool, held: bool) -> None:
    named = {"type": choice} | ({"name": "look_up"} if choice == "tool" else {})
    tools = [{**CUSTOM[0], "input_schema": CITY}]
    with serve() as served:
        body = {**BODY, "tools": tools, "tool_choice": named}
        httpx.post(f"{served.url}{MESSAGES}", json=body).raise_for_status()
        submitted = served.client.submitted[-1]
    assert (b"look_up" in bytes(i for i in submitted.prompt if i < 256)) == tells
    assert (submitted.params.grammar is not None) == held


def test_a_call_that_was_cut_off_has_what_came() -> None:
    cut = '<tool_call>{"name": "look_up", "arguments": {"city": "Zür'
    with serve(scripted(cut)) as served:
        body = {**BODY, "tools": CUSTOM, "max_tokens": len(cut.encode())}
        message = httpx.post(f"{served.url}{MESSAGES}", json=body).json()
    assert message["content"][0]["input"] == {"city": "Zür"}
    assert message["stop_reason"] == "max_tokens"


BAD = [
    ({"max_tokens": None}, "max_tokens", "missing_field"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"temperature": 1.5}, "temperature", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{**USER, "content": [IMAGE]}]}, "messages[0].content[0].type",
     "unsupported_field"),
    ({"messages": [{**USER, "content": [USE]}]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]},
     "messages[1].content[0].type", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages[1]", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1]", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "content": [USE]},
                   {"role": "user", "content": [TEXT, RESULT]}]}, "messages[2].content[1]",
     "invalid_value"),
    ({"messages": [USER, *ANSWERED]}, "messages[1].content[0].tool_use_id", "invalid_value"),
    ({"messages": [USER, {"role": "assistant", "content": [USE, USE]}, USER]}, "messages[1]",
     "invalid_value"),
    ({"messages": [{**USER, "content": [{**TEXT, "citations": [{}]}]}]},
     "messages[0].content[0].citations", "unsupported_field"),
    ({"messages": [{**USER, "content": "x" * 600}]}, "messages", "context_length_exceeded"),
    ({"system": "x" * 600}, "system", "context_length_exceeded"),
    ({"stop": ["a"]}, "stop", "unsupported_field"),
    ({"stop_sequences": "a"}, "stop_sequences", "invalid_value"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type",
     "unsupported_field"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type",
     "unsupported_field"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "missing_field"),
    ({"tools": CUSTOM * 2}, "tools[1].name", "invalid_value"),
    ({"tools": [{**CUSTOM[0], "strict": True, "input_schema": {"type": "object", "not": {}}}]},
     "tools[0].input_schema", "invalid_value"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
    ({"tools": CUSTOM, "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name",
     "invalid_value"),
    ({"output_config": {"effort": "low"}}, "output_config.effort", "unsupported_field"),
    ({"container": "c"}, "container", "unsupported_field"),
    ({"n": 2}, "n", "unknown_field"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param", "code"), BAD)
def test_errors_name_the_field(
    http: httpx.Client, more: dict[str, Any], param: str, code: str
) -> None:
    """Law: a 400 in Anthropic's envelope that names the field of this API, and no field that only
    chat has."""
    reply = http.post(MESSAGES, json={**BODY, **more})
    found = reply.json()
    assert reply.status_code == 400, found
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert (found["error"]["param"], found["error"]["code"]) == (param, code), found
    assert not {"continue_final_message", "tool_calls"} & set(re.findall(r"\w+", str(found)))
    assert found["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_other_refusals(http: httpx.Client) -> None:
    """An unknown model, a wrong method and an unknown route get Anthropic's envelope as well."""
    unknown = http.post(MESSAGES, json={**BODY, "model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert http.get(MESSAGES).json()["type"] == "error"
    assert http.post(f"{MESSAGES}/batches", json={}).json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "sk-one"}, 200),
        ({"authorization": "Bearer sk-one"}, 200),
        ({"authorization": "Bearer no", "x-api-key": "sk-one"}, 401),
        ({"x-api-key": "sk-two"}, 401),
        ({}, 401),
    ],
)
def test_keys_by_either_header(headers: dict[str, str], status: int) -> None:
    """Anthropic's clients send `x-api-key`; `Authorization` wins if both are sent."""
    with serve(api_key="sk-one") as served:
        reply = httpx.post(f"{served.url}{MESSAGES}", json=BODY, headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["error"]["type"] == "authentication_error"


def test_a_stream_that_breaks_off_says_so() -> None:
    """The last event is an error, and there is no message_stop."""
    gate = asyncio.Semaphore(2)
    with serve(FakeClient(gate=gate)) as served:
        body = {**BODY, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{served.url}{MESSAGES}", json=body) as reply:
            lines = reply.iter_lines()
            while "content_block_delta" not in next(lines):
                pass
            served.call(served.client.die)
            rest = "\n".join(lines)
    assert rest.rstrip().rpartition("event: ")[2].startswith("error\n")
    last = json.loads(rest.rstrip().rpartition("data: ")[2])
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


class Cached(FakeClient):
    """Finds four tokens of each prompt in the prefix cache."""

    def submit(self, submit: Submit) -> Stream:
        stream = super().submit(submit)
        put = stream.put

        def cached(output: Output) -> None:
            put(structs.replace(output, cached_tokens=4) if output.cached_tokens == 0 else output)

        stream.put = cached  # type: ignore[method-assign]
        return stream


def test_cached_tokens_are_counted_apart() -> None:
    """Law: input and cache-read tokens add up to the prompt, from the first event on."""
    with serve(Cached()) as served:
        reply = httpx.post(f"{served.url}{MESSAGES}", json={**BODY, "stream": True})
        size = len(served.client.submitted[-1].prompt)
    first = events_of(reply.text)[0]["message"]["usage"]
    for usage in (first, read_message(events_of(reply.text))["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (size - 4, 4)
