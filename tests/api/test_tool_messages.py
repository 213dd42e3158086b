"""Tool calls and their results on their way back to the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.serving import MODEL, serve
from tests.support.tools import HELLO, scripted

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve(scripted("hi")) as served, served.http() as http:
        yield http


def call(id: str, city: str, arguments: str | None = None) -> dict[str, Any]:
    text = json.dumps({"city": city, "unit": None}) if arguments is None else arguments
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": text}}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_calls_and_results_reach_the_template() -> None:
    """Templates get arguments as an object with its nulls, null content as empty, and results in
    the order of their calls, since they match them by position only."""
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("a", "Rome"), call("b", "Bonn")],
        },
        result("b", "cold"),
        result("a", "warm"),
    ]
    seen: list[Any] = []

    class Template(ByteTokenizer):
        def render(self, messages: Any, /, **options: Any) -> str:
            seen.append(messages)
            return super().render(messages, **options)

    with serve(scripted("ok"), tokenizer=Template()) as served:
        body = {"model": MODEL, "messages": messages}
        assert httpx.post(served.url + CHAT, json=body).is_success
    assistant, first, second = seen[-1][1:]
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "unit": None}
    assert (first["content"], second["content"]) == ("warm", "cold")
    assert first["name"] == "get_weather"


def test_arguments_that_are_no_object_pass_unchanged() -> None:
    """A broken call must be representable, or no model could be told that its call was broken."""
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call("a", "", '{"city": '), call("b", "", "")]},
        result("a", "that was no JSON"),
    ]
    with serve(scripted("ok")) as served:
        body = {"model": MODEL, "messages": messages}
        assert httpx.post(served.url + CHAT, json=body).is_success
        prompt = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
    assert json.dumps('{"city": ') in prompt
    assert '"arguments": {}' in prompt


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 80 + "]" * 80, "[" * 900 + "]" * 900])
def test_arguments_that_no_template_can_write(value: str) -> None:
    """Bug: half a surrogate pair and deep nesting were a 500; they are passed on as text."""
    arguments = f'{{"city": {value}}}'
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call("a", "f", arguments)]}]
    with serve(scripted("ok")) as served:
        body = {"model": MODEL, "messages": messages}
        reply = httpx.post(served.url + CHAT, json=body)
        assert reply.is_success, reply.text
        prompt = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
    assert json.dumps(arguments) in prompt


def test_arguments_count_as_values_of_the_body(http: httpx.Client) -> None:
    """Bug: eight megabytes of lists within the text of arguments blocked every other stream."""
    calls = [call(str(i), "f", '{"a": [' + "[]," * 70_000 + "[]]}") for i in range(4)]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    reply = http.post(CHAT, json={"model": MODEL, "messages": messages})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert "JSON values" in reply.json()["error"]["message"]
