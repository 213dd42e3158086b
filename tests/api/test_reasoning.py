"""Thinking is separated from content, streamed or not, and the counts, stops and grammars of a
reply stay correct beside it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support import message_stream_rules
from tests.support.byte_tokenizer import EOS, ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.response_stream_rules import read_response
from tests.support.serving import MODEL, serve
from tests.support.tools import HELLO, TOOLS, scripted

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKS = ByteTokenizer(thinks="<think></think>")  # the model may think
BEGUN = ByteTokenizer(thinks="<think></think> <think>\n")  # the prompt has opened the thinking
OVER = ByteTokenizer(thinks="<think></think> <think>\n\n</think>\n\n")  # the prompt has closed it
THOUGHT, ANSWER = "Zürich? Say 5. Done", "It is 5 degrees in Zürich. Done, and more"
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
CALL = '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>'


def post(
    text: str,
    *,
    tokenizer: ByteTokenizer = THINKS,
    tokens_per_step: int = 1,
    route: str = CHAT,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Any, FakeClient]:
    """Return the reply, or a stream's list of events, of a server whose engine writes `text`."""
    client = scripted(text, tokens_per_step=tokens_per_step)
    with (
        serve(client, tokenizer=tokenizer, **(settings or {})) as served,
        httpx.Client(base_url=served.url, timeout=60) as http,
    ):
        body: dict[str, Any] = {"input": "hello"} if route == RESPONSES else {"messages": HELLO}
        if route == CHAT and fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        reply = http.post(route, json={"model": MODEL} | body | fields)
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        return reply.json(), client
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines], client


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """Merge a stream into the choice of an unstreamed reply."""
    message: dict[str, Any] = {}
    choice: dict[str, Any] = {"message": message, "token_ids": [], "provenance": []}
    for chunk in chunks:
        for piece in chunk["choices"]:
            for name, text in piece["delta"].items():
                if name in ("content", "reasoning_content"):
                    message[name] = message.get(name, "") + (text or "")
                elif name != "tool_calls":
                    message[name] = text
            choice["finish_reason"] = piece["finish_reason"]
            choice["token_ids"] += piece.get("token_ids", ())
            choice["provenance"] += piece.get("provenance", ())
            if piece["logprobs"]:
                scores = choice.setdefault("logprobs", {"content": []})
                scores["content"] += piece["logprobs"]["content"]
    return choice


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(THINKS, REPLY), (BEGUN, REPLY.removeprefix("<think>\n"))],
)
def test_streamed_and_whole_replies_say_the_same(
    tokenizer: ByteTokenizer, text: str, tokens_per_step: int
) -> None:
    """Texts, ids, log-probabilities, provenance and usage agree, whatever the tokens per step, and
    whether the prompt or the model opens the thinking."""
    fields = {"return_token_ids": True, "provenance": True, "logprobs": True}
    how: Any = {"tokenizer": tokenizer, "tokens_per_step": tokens_per_step, **fields}
    whole, _ = post(text, **how)
    events, _ = post(text, **how, stream=True)
    [choice] = whole["choices"]
    streamed = put_together(events)
    assert choice["message"] == {
        "role": "assistant", "content": ANSWER, "refusal": None, "reasoning_content": THOUGHT,
    }  # fmt: skip
    assert streamed["message"] == choice["message"]
    for name in ("token_ids", "provenance", "finish_reason"):
        assert streamed[name] == choice[name]
    assert choice["token_ids"] == [*text.encode(), EOS]
    assert "".join(origin["text"] for origin in choice["provenance"]) == text
    assert streamed["logprobs"]["content"] == choice["logprobs"]["content"]
    assert len(choice["logprobs"]["content"]) == len(text.encode())
    usage = whole["usage"]
    thought = len(text.removesuffix(f"\n\n{ANSWER}").encode())
    assert usage["completion_tokens"] == len(text.encode()) + 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == thought
    assert events[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_a_prompt_may_have_closed_the_thinking() -> None:
    """Then all of the reply is content, even what looks like thinking."""
    reply, _ = post(REPLY, tokenizer=OVER)
    assert reply["choices"][0]["message"]["content"] == REPLY
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_cut_by_the_length(stream: bool) -> None:
    """All of it is thinking, the content is empty, and the finish is "length"."""
    size = len(f"<think>\n{THOUGHT}\n</thi".encode())
    reply, _ = post(REPLY, max_tokens=size, stream=stream)
    choice = put_together(reply) if stream else reply["choices"][0]
    assert choice["message"]["reasoning_content"] == f"{THOUGHT}\n</thi"
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "length"
    usage = (reply[-1] if stream else reply)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


@pytest.mark.parametrize("stop", ["Done", "ö", "<", "think"])
def test_stop_strings_end_the_content_only(stop: str) -> None:
    """Bug: a stop string within the thinking, or within its tags, left no answer at all."""
    for tokens_per_step in (1, 4):
        reply, _ = post(REPLY, stop=stop, tokens_per_step=tokens_per_step)
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"] == THOUGHT
        assert message["content"].rstrip() == ANSWER.partition(stop)[0].rstrip()


def test_fields_and_settings_that_switch_it_off() -> None:
    """Thinking is left out of the reply, left in the content, or not looked for."""
    hidden, _ = post(REPLY, include_reasoning=False)
    assert hidden["choices"][0]["message"]["content"] == ANSWER
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    events, _ = post(REPLY, include_reasoning=False, stream=True)
    assert put_together(events)["message"]["content"] == ANSWER
    for off in ({"separate_reasoning": False}, {"settings": {"reasoning_parser": "none"}}):
        reply, _ = post(REPLY, **off)
        assert reply["choices"][0]["message"]["content"] == REPLY
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    named, _ = post(REPLY, tokenizer=ByteTokenizer(), settings={"reasoning_parser": "think"})
    assert named["choices"][0]["message"]["reasoning_content"] == THOUGHT


def test_a_grammar_is_sent_with_its_lead() -> None:
    """The engine applies the grammar after the thinking; a model that is told not to think is
    constrained from its first token."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for tokenizer, lead in ((BEGUN, "start: text_marker"), (THINKS, "start: ("), (OVER, "")):
        for fields in ({"response_format": schema}, {"tools": TOOLS, "tool_choice": "required"}):
            _, client = post(REPLY, tokenizer=tokenizer, **fields)
            grammar = client.submitted[0].params.grammar
            assert grammar is not None
            assert grammar.lead.startswith(lead)
            assert bool(grammar.lead) == bool(lead)
    _, client = post(REPLY, tokenizer=BEGUN)
    assert client.submitted[0].params.grammar is None


@pytest.mark.parametrize("required", [False, True])
def test_calls_behind_thinking(required: bool) -> None:
    """A call within the thinking is none, one after it is. The thinking is returned even where only
    calls may be written."""
    text = f"<think>Should I {CALL}?</think>\n\n{CALL}"
    choice = {"tool_choice": "required"} if required else {}
    with (
        serve(scripted(text), tokenizer=THINKS) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        made: Any = sdk.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, extra_body=choice
        )
    message = made.choices[0].message
    assert message.reasoning_content == f"Should I {CALL}?"
    assert message.content is None
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Rome"}']


def test_a_reply_resumes_anywhere() -> None:
    """`resume` works within the thinking, within its tags and after them: the rest is what was
    missing, and its usage counts the whole."""
    fields: Any = {"return_token_ids": True, "stream": True, "temperature": 0}
    whole, _ = post(REPLY, **fields)
    message = put_together(whole)["message"]
    for cut in (1, 3, 12, len(f"<think>\n{THOUGHT}\n</th".encode()), len(REPLY.encode()) - 4):
        had = list[Any]()
        for chunk in whole:
            if len(put_together([*had, chunk])["token_ids"]) <= cut:
                had.append(chunk)
        before = put_together(had)
        assert before["token_ids"] == list(REPLY.encode()[:cut])
        rest, _ = post(REPLY, resume={"token_ids": before["token_ids"]}, **fields)
        after = put_together(rest)
        for name in ("reasoning_content", "content"):
            parts = [part["message"].get(name, "") for part in (before, after)]
            assert "".join(parts) == message[name], (cut, name)
        assert (
            rest[-1]["usage"]["completion_tokens_details"]
            == (whole[-1]["usage"]["completion_tokens_details"])
        )


@pytest.mark.parametrize("text", [f"{REPLY} \n", REPLY[:15] + "</thi"])
def test_a_complete_reply_has_no_more_text(text: str) -> None:
    """Bug: unstreamed, the text that a parser holds back to the end came again."""
    fields: Any = {"return_token_ids": True, "temperature": 0, "max_tokens": len(text.encode())}
    whole, _ = post(text, **fields)
    ids = whole["choices"][0]["token_ids"]
    assert ids == list(text.encode())
    again, _ = post(text, resume={"token_ids": ids}, **fields)
    [choice] = again["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert choice["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("tokens_per_step", [1, 5, 1000])
@pytest.mark.parametrize("size", [None, 14])
def test_a_response_has_a_reasoning_item(tokens_per_step: int, size: int | None) -> None:
    """Events and the unstreamed reply agree: reasoning_text first, then the message; at the length
    limit, the open item is incomplete."""
    limit = {} if size is None else {"max_output_tokens": size}
    how: Any = {"route": RESPONSES, "tokens_per_step": tokens_per_step, **limit}
    scores: Any = {"include": ["message.output_text.logprobs"]}
    whole, _ = post(REPLY, **how, **scores)
    events, _ = post(REPLY, **how, **scores, stream=True)
    streamed = read_response(events)
    thought = THOUGHT if size is None else THOUGHT[:5]
    for response in (whole, streamed):
        reasoning = response["output"][0]
        assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
        assert reasoning["content"] == [{"type": "reasoning_text", "text": thought}]
        if size is not None:
            assert len(response["output"]) == 1
            assert response["status"] == reasoning["status"] == "incomplete"
            continue
        part = response["output"][1]["content"][0]
        assert part["text"] == ANSWER
        tokens = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert tokens.decode() == f"\n\n{ANSWER}"
        details = response["usage"]["output_tokens_details"]
        assert details["reasoning_tokens"] == len(f"<think>\n{THOUGHT}\n</think>".encode())


@pytest.mark.parametrize("reads", [(), ("reasoning_content",)])
def test_the_output_of_a_response_may_be_sent_back(reads: tuple[str, ...]) -> None:
    """Agents send all items of the last output at the start of the next input. Thinking joins the
    message that it led to, for templates that read it."""
    first, _ = post(REPLY, route=RESPONSES)
    items = [
        {"role": "user", "content": "hello"},
        *first["output"],
        {"role": "user", "content": "a"},
    ]
    tokenizer = ByteTokenizer(thinks="<think></think>", reads=reads)
    second, client = post(REPLY, route=RESPONSES, tokenizer=tokenizer, input=items)
    assert second["status"] == "completed"
    prompt = bytes(i for i in client.submitted[0].prompt if i < 256).decode()
    assert ANSWER in prompt
    assert (f"<think>{THOUGHT}</think>{ANSWER}" in prompt) is bool(reads)
    assert (THOUGHT in prompt) is bool(reads)


class Channels(ByteTokenizer):
    """gpt-oss: a template with its channels."""

    def __init__(self) -> None:
        super().__init__(thinks="<|channel|>analysis")


@pytest.mark.parametrize("stream", [False, True])
def test_channels_are_told_apart_without_tools(stream: bool) -> None:
    """gpt-oss writes headers before everything, which do not belong in the content."""
    text = (
        "<|channel|>analysis<|message|>Hm. Done<|end|><|start|>assistant"
        "<|channel|>final<|message|>Hi. Done<|return|>"
    )
    reply, _ = post(text, tokenizer=Channels(), stream=stream, stop=["Done"])
    choice = put_together(reply) if stream else reply["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm. Done"
    assert choice["message"]["content"].rstrip() == "Hi."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, True),
        ({"type": "adaptive"}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "disabled"}, False),
    ],
)
def test_a_message_has_its_thinking_in_a_block(
    thinking: dict[str, str] | None, shown: bool, stream: bool
) -> None:
    """Law: in /v1/messages the thinking is a block before the text, with its own events, unless it
    is left out; such a message may be sent back."""
    more: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
    more |= {"route": "/v1/messages", "messages": HELLO, "max_tokens": 400, "stream": stream}
    reply, _ = post(REPLY, **more)
    message = message_stream_rules.read_message(reply) if stream else reply
    thought = {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert message["content"] == [thought] * shown + [{"type": "text", "text": ANSWER}]
    history = [*HELLO, {"role": "assistant", "content": message["content"]}, *HELLO]
    post(REPLY, **{**more, "messages": history})
