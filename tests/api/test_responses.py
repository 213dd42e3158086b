"""/v1/responses through the official SDK: text, events, errors; the same replies as chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.api.test_fields import FLAT, LOGPROBS
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script
from tests.support.response_stream_rules import read_response
from tests.support.responses import BODY, RESPONSES, SAID
from tests.support.serving import MODEL, Served, serve
from tests.support.tools import CALLS, scripted


@pytest.fixture(scope="module")
def sdk(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def events_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's events; each is named by its type, and there is no [DONE]."""
    reply = httpx.post(f"{url}{RESPONSES}", json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_create(sdk: OpenAI) -> None:
    """The whole object in the SDK's types, with the settings that made it."""
    reply = sdk.responses.create(
        model=MODEL, input="hello", max_output_tokens=7, extra_body={"seed": 3}
    )
    assert reply.id.startswith("resp_")
    assert (reply.object, reply.model, reply.status) == ("response", MODEL, "incomplete")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.error is None
    assert len(reply.output_text) == 7
    [message] = reply.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert message.id.startswith("msg_")
    assert reply.usage is not None
    assert reply.usage.output_tokens == 7
    assert reply.usage.total_tokens == reply.usage.input_tokens + 7
    assert reply.usage.input_tokens_details.cached_tokens == 0
    assert reply.usage.output_tokens_details.reasoning_tokens == 0
    extra = reply.usage.model_extra
    assert extra is not None
    assert extra["speculation"]["rounds"] == 3
    assert (reply.temperature, reply.top_p, reply.truncation) == (1.0, 1.0, "disabled")
    assert (reply.tools, reply.tool_choice, reply.parallel_tool_calls) == ([], "auto", True)
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "text"
    assert reply.model_extra is not None
    assert (reply.model_extra["seed"], reply.model_extra["store"]) == (3, False)


def test_the_request_is_repeated(sdk: OpenAI) -> None:
    """The reply repeats the request's settings, no-ops included."""
    reply = sdk.responses.create(
        model=MODEL, input="hello", instructions="Be brief.", max_output_tokens=3,
        temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="u", safety_identifier="s",
        prompt_cache_key="k", service_tier="auto", store=False, truncation="disabled",
        text={"verbosity": "medium"},
    )  # fmt: skip
    assert (reply.instructions, reply.max_output_tokens) == ("Be brief.", 3)
    assert (reply.temperature, reply.top_p, reply.metadata) == (0.5, 0.9, {"a": "b"})
    assert (reply.user, reply.safety_identifier, reply.prompt_cache_key) == ("u", "s", "k")
    assert reply.service_tier == "default"
    assert reply.text is not None
    assert reply.text.verbosity == "medium"


def test_a_reply_that_ends_by_itself_is_completed() -> None:
    """An empty reply is completed, too: it has a message with empty text."""
    for text in (b"one two", b""):
        script = listed_script(list(text), then=257)
        with serve(FakeClient(script=script)) as served:
            events = events_of(served.url, {"model": MODEL, "input": "a"})
            whole = httpx.post(f"{served.url}{RESPONSES}", json={"model": MODEL, "input": "a"})
        for response in (read_response(events), whole.json()):
            assert response["status"] == "completed"
            [message] = response["output"]
            assert message["content"] == [
                {"type": "output_text", "text": text.decode(), "annotations": []}
            ]
            assert response["completed_at"] >= response["created_at"]


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"input": "hello"}, [{"role": "user", "content": "hello"}]),
        (
            {"input": "hello", "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "a"},
                    {**SAID, "status": "completed", "id": "msg_1"},
                    {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                    {"role": "user", "content": [{"type": "input_text", "text": t} for t in "cd"]},
                ]
            },
            [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": [{"type": "text", "text": t} for t in "cd"]},
            ],
        ),
    ],
)
def test_replies_equal_those_of_chat(
    served: Served, http: httpx.Client, body: dict[str, Any], messages: list[Any]
) -> None:
    """Law: prompt, parameters, text and usage equal those of the same chat request."""
    fields: dict[str, Any] = {"model": MODEL, "seed": 5, "temperature": 0.7, "top_k": 5}
    response = http.post(RESPONSES, json={**fields, **body, "max_output_tokens": 9}).json()
    ours = served.client.submitted[-1]
    chat = http.post(
        "/v1/chat/completions", json={**fields, "messages": messages, "max_tokens": 9}
    ).json()
    theirs = served.client.submitted[-1]
    assert (ours.prompt, ours.params) == (theirs.prompt, theirs.params)
    text = response["output"][0]["content"][0]["text"]
    assert text == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["speculation"] == chat["usage"]["speculation"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize(
    "more",
    [
        {},
        LOGPROBS,
        {**LOGPROBS, "top_logprobs": 2},
        {"provenance": True, "return_token_ids": True},
        {"prediction": {"type": "content", "content": "abc"}, "speculation": {"max_draft": 1}},
    ],
)
def test_a_stream_adds_up(tokens_per_step: int, more: dict[str, Any]) -> None:
    """Law: the events are in order, and the last Response equals the unstreamed one but for ids."""
    with serve(FakeClient(tokens_per_step=tokens_per_step)) as served:
        streamed = read_response(events_of(served.url, {**BODY, **more}))
        whole = httpx.post(f"{served.url}{RESPONSES}", json={**BODY, **more}).json()
    assert without_ids(streamed) == without_ids(whole)
    assert streamed["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 500])
@pytest.mark.parametrize("more", [{}, LOGPROBS])
def test_a_stream_contains_calls(tokens_per_step: int, more: dict[str, Any]) -> None:
    """Law: text, then one item per call, whatever the tokens per step; the text before the first
    call has one log-probability per token."""
    body = {"model": MODEL, "input": "hi", "tools": FLAT, "seed": 1, **more}
    calls = CALLS.replace("get_weather", "look_up").replace("get_time", "look_up")
    with serve(scripted(calls, tokens_per_step=tokens_per_step)) as served:
        streamed = read_response(events_of(served.url, body))
        whole = httpx.post(f"{served.url}{RESPONSES}", json=body).json()
    assert without_ids(streamed) == without_ids(whole)
    message, *items = streamed["output"]
    assert [item["name"] for item in items] == ["look_up", "look_up"]
    assert [json.loads(item["arguments"]) for item in items] == [
        {"city": "Zürich"}, {"city": "Rome"}
    ]  # fmt: skip
    assert len({item["call_id"] for item in items}) == 2
    assert streamed["status"] == "completed"
    [part] = message["content"]
    if more:
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]


def test_extensions_equal_those_of_chat() -> None:
    """Provenance, token ids and prediction usage equal chat's, in streams piece by piece."""
    client = FakeClient(script=listed_script(list(b"one two"), then=257), tokens_per_step=3)
    predicted = {"type": "content", "content": "one two"}
    more = {"provenance": True, "return_token_ids": True, "prediction": predicted}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **more}
    with serve(client) as served:
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=chat).json()
        body = {"model": MODEL, "input": "a", **more}
        streamed = read_response(events_of(served.url, body))
    [choice] = reply["choices"]
    assert streamed["provenance"] == choice["provenance"]
    assert streamed["token_ids"] == choice["token_ids"]
    assert streamed["prompt_token_ids"] == reply["prompt_token_ids"]
    assert "".join(piece["text"] for piece in streamed["provenance"]) == "one two"
    details = reply["usage"]["completion_tokens_details"]
    assert details.items() <= streamed["usage"]["output_tokens_details"].items()
    assert details["accepted_prediction_tokens"] > 0


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs between two replies to one request."""
    drawn = {"id", "created_at", "completed_at"}
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    usage = {n: v for n, v in response["usage"].items() if n != "speculation"}
    kept = {name: value for name, value in response.items() if name not in drawn}
    return {**kept, "output": output, "usage": usage}


def test_sdk_stream_helper(sdk: OpenAI) -> None:
    """`responses.stream` builds a Response from our events that equals the unstreamed one."""
    with sdk.responses.stream(model=MODEL, input="hello", extra_body={"seed": 3}) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    whole = sdk.responses.create(model=MODEL, input="hello", extra_body={"seed": 3})
    assert text == whole.output_text
    script = listed_script(list(b"one two"), then=257)
    with (
        serve(FakeClient(script=script, tokens_per_step=2)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model=MODEL, input="hello") as stream,
    ):
        final = stream.get_final_response()
    assert (final.output_text, final.status) == ("one two", "completed")
    assert final.usage is not None
    assert final.usage.output_tokens == 8


def test_async_client(served: Served) -> None:
    """The same through AsyncOpenAI: unstreamed, streamed, by the helper, counted, refused."""

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
            fields: dict[str, Any] = {"model": MODEL, "input": "a", "max_output_tokens": 9}
            seed = {"seed": 4}
            whole = await sdk.responses.create(**fields, extra_body=seed)
            stream = await sdk.responses.create(**fields, extra_body=seed, stream=True)
            kinds = [event.type async for event in stream]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.incomplete"
            async with sdk.responses.stream(**fields, extra_body=seed) as helper:
                events = [event async for event in helper]
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == whole.output_text
            count = await sdk.responses.input_tokens.count(model=MODEL, input="a")
            assert whole.usage is not None
            assert count.input_tokens == whole.usage.input_tokens
            with pytest.raises(openai.BadRequestError):
                await sdk.responses.create(model=MODEL, input=[])

    asyncio.run(main())


def test_input_tokens(served: Served, sdk: OpenAI) -> None:
    """Law: the count equals the usage of the same request, tools included, and runs no step."""
    for fields in ({}, {"instructions": "Be brief."}, {"tools": FLAT}):
        body: dict[str, Any] = {"model": MODEL, "input": [SAID], **fields}
        steps = served.client.steps
        count = sdk.responses.input_tokens.count(**body)
        assert served.client.steps == steps
        reply = sdk.responses.create(**body, max_output_tokens=1)
        assert reply.usage is not None
        assert count.input_tokens == reply.usage.input_tokens
        assert count.object == "response.input_tokens"
    assert sdk.responses.input_tokens.count(input="a").input_tokens > 0
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.input_tokens.count(model=MODEL, input="x" * 20_000)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.input_tokens.count(model="other", input="x")


def test_output_can_be_sent_back() -> None:
    """A reply's items, calls included, are valid input, and give the same prompt as chat."""
    tools = [{**FLAT[0], "strict": False}]
    function = {name: value for name, value in tools[0].items() if name != "type"}
    text = 'So: <tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    hello = {"role": "user", "content": "hi"}
    with serve(scripted(text)) as served:
        sdk: Any = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with sdk:
            first = sdk.responses.create(model=MODEL, input="hi", tools=tools, **LOGPROBS)
            message, call = first.output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            conversation = [hello, message, call, result]
            assert sdk.responses.create(model=MODEL, input=conversation, tools=tools).output
            ours = served.client.submitted[-1].prompt
            called = {"name": "look_up", "arguments": call.arguments}
            made = {"id": call.call_id, "type": "function", "function": called}
            content = message.content[0].text
            messages = [
                hello,
                {"role": "assistant", "content": content, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": call.call_id, "content": "42"},
            ]
            offered = [{"type": "function", "function": function}]
            sdk.chat.completions.create(model=MODEL, messages=messages, tools=offered)
            assert served.client.submitted[-1].prompt == ours


def test_stored_responses_are_refused(sdk: OpenAI) -> None:
    """Clients that rely on stored responses get a clear answer."""
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model=MODEL, input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    assert "send the whole conversation as `input`" in refused.value.message
    for ask in (
        lambda: sdk.responses.retrieve("resp_1"),
        lambda: sdk.responses.delete("resp_1"),
        lambda: sdk.responses.cancel("resp_1"),
        lambda: sdk.responses.input_items.list("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError) as absent:
            ask()
        assert absent.value.code == "not_stored"


def test_another_model_is_a_404_and_none_a_400(http: httpx.Client) -> None:
    """As on every endpoint."""
    assert http.post(RESPONSES, json={**BODY, "model": "other"}).status_code == 404
    missing = http.post(RESPONSES, json={"input": "a"})
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "model"


def test_a_lost_engine_fails_the_response() -> None:
    """A stream ends with response.failed, in sequence; unstreamed it is a 503."""
    gate = asyncio.Semaphore(0)
    client = FakeClient(gate=gate)
    with (
        serve(client) as served,
        httpx.stream("POST", f"{served.url}{RESPONSES}", json={**BODY, "stream": True}) as reply,
    ):
        served.until(lambda: client.inflight == 1)
        served.call(gate.release)
        served.call(gate.release)
        served.until(lambda: client.steps == 3)
        served.call(client.die)
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "died" in response["error"]["message"]
    assert len(response["output"][0]["content"][0]["text"]) == 2


def test_a_reader_that_leaves_ends_the_work() -> None:
    """Streamed or not, its request is aborted."""
    for stream in (True, False):
        client = FakeClient(gate=asyncio.Semaphore(0))
        with serve(client) as served:
            served.leave(RESPONSES, {**BODY, "stream": stream})
            served.until(lambda client=client: len(client.aborted) == 1)  # type: ignore[misc]


def test_no_chat_template() -> None:
    """Without a chat template, `input` is refused."""
    with serve(FakeClient(), tokenizer=ByteTokenizer(chat=None)) as served:
        reply = httpx.post(f"{served.url}{RESPONSES}", json=BODY)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "input"
        entries = httpx.get(f"{served.url}/v1/capabilities").json()["endpoints"][RESPONSES]
        assert entries["input"]["status"] == "refused"


def test_a_replys_settings_may_be_sent_back(http: httpx.Client) -> None:
    """Bug: a client that sent a reply's own settings back was refused, with tools or without."""
    response = http.post(RESPONSES, json=BODY).json()
    settings = {name: response[name] for name in ("tool_choice", "parallel_tool_calls", "tools")}
    assert settings == {"tool_choice": "auto", "parallel_tool_calls": True, "tools": []}
    assert http.post(RESPONSES, json={**BODY, **settings}).status_code == 200
