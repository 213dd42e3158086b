"""The form of a model's calls: from its template, by configuration, or by special tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.byte_tokenizer import EOS, ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script, make_ready
from tests.support.serving import MODEL, serve
from tests.support.tools import CALLS, HELLO, TOOLS, accumulated, scripted

CHAT = "/v1/chat/completions"


class NoToolsTemplate(ByteTokenizer):
    """A template that ignores tools."""

    def render(self, messages: Any, /, *, tools: Any = None, **options: Any) -> str:
        return super().render(messages, **options)


class UnknownFormTemplate(ByteTokenizer):
    """A template whose calls have a form that is unknown here."""

    def render(self, messages: Any, /, **options: Any) -> str:
        return super().render(messages, **options).replace("<tool_call>", "[TOOL_CALLS]")


@pytest.mark.parametrize(
    ("tokenizer", "settings", "problem"),
    [
        (NoToolsTemplate(), {}, "does not support tools"),
        (NoToolsTemplate(), {"tool_parser": "hermes"}, "does not support tools"),
        (UnknownFormTemplate(), {}, "server.tool_parser"),
        (ByteTokenizer(), {"tool_parser": "none"}, "switched off"),
    ],
)
def test_models_that_cannot_be_offered_tools(
    tokenizer: ByteTokenizer, settings: dict[str, Any], problem: str
) -> None:
    """A clear refusal: tools are never dropped silently."""
    with serve(scripted("hi"), tokenizer=tokenizer, **settings) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        error = httpx.post(served.url + CHAT, json=body).json()["error"]
        assert error["param"] == "tools"
        assert problem in error["message"]
        body["tools"] = []
        assert httpx.post(served.url + CHAT, json=body).is_success


def test_the_parser_may_be_named() -> None:
    """`server.tool_parser` overrides what the template shows."""
    text = '{"name": "get_time", "parameters": {"city": "Rome"}}'
    with serve(
        scripted(text), tool_parser="llama3_json", tokenizer=UnknownFormTemplate()
    ) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        [choice] = httpx.post(served.url + CHAT, json=body).json()["choices"]
    [made] = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_time", "arguments": '{"city": "Rome"}'}
    assert choice["message"]["content"] is None


class Tagged(ByteTokenizer):
    """Llama's form of calls, with its tag as a special token, which has no text."""

    TAG = 300

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text == "<|python_tag|>":
            return [self.TAG]
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        return b"<|python_tag|>" if token == self.TAG else super().token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token == self.TAG or super().is_special(token)

    def render(self, messages: Any, /, **options: Any) -> str:
        text = super().render(messages, **options)
        return text.replace('"arguments"', '"parameters"').replace("tool_call>", "call>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tag_that_leaves_no_text_is_seen(stream: bool) -> None:
    """The parser sees the special token before a call; the client sees it only if it asks for
    special tokens and no call follows."""

    def reply(text: str, **fields: Any) -> tuple[str | None, list[Any]]:
        script = listed_script([Tagged.TAG, *text.encode()], then=EOS)
        ready = make_ready(eos_ids=[EOS], vocab_size=301)
        with (
            serve(FakeClient(script=script, ready=ready), tokenizer=Tagged()) as served,
            OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
        ):
            made: Any = sdk.chat.completions.create(
                model=MODEL, messages=HELLO, tools=TOOLS, stream=stream, extra_body=fields
            )
            if stream:
                [state] = accumulated(made)
                return state["content"] or None, [tuple(c[1:]) for c in state["calls"]]
            message = made.choices[0].message
            calls = [c.function for c in message.tool_calls or ()]
            return message.content, [(c.name, c.arguments) for c in calls]

    called = '{"name": "get_time", "parameters": {"city": "Rome"}}'
    for skip in (True, False):
        found = reply(called, skip_special_tokens=skip)
        assert found == (None, [("get_time", '{"city": "Rome"}')])
    assert reply("print(1)") == ("print(1)", [])
    assert reply("print(1)", skip_special_tokens=False) == ("<|python_tag|>print(1)", [])


def test_every_token_is_reported_once() -> None:
    """Ids and provenance of a reply with calls cover every token once, streamed or not."""
    with serve(scripted(CALLS, tokens_per_step=3)) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "return_token_ids": True}
        body["provenance"] = True
        with served.http() as http:
            [choice] = http.post(CHAT, json=body).json()["choices"]
            text = http.post(CHAT, json={**body, "stream": True}).text
    assert choice["token_ids"] == [*CALLS.encode(), EOS]
    streamed: dict[str, list[Any]] = {"token_ids": [], "provenance": []}
    for line in text.splitlines():
        if line.startswith("data: {"):
            [piece] = json.loads(line.removeprefix("data: "))["choices"]
            for name, entries in streamed.items():
                entries += piece.get(name) or []
    assert streamed["token_ids"] == choice["token_ids"]
    assert streamed["provenance"] == choice["provenance"]
    assert len(streamed["provenance"]) > 0
