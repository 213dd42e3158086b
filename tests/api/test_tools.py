"""Tools through the official SDK: offered, called, streamed, answered; and every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.byte_tokenizer import EOS, ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script, make_ready
from tests.support.serving import MODEL, serve

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


TOOLS: list[Any] = [tool(), tool("get_time")]
CALLS = (
    'Let me see.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def scripted(text: str, *, tokens_per_step: int = 1) -> FakeClient:
    """An engine that says `text`, in bytes, and ends."""
    script = listed_script(list(text.encode()), then=EOS)
    ready = make_ready(eos_ids=[EOS], max_model_len=2048)
    return FakeClient(script=script, ready=ready, tokens_per_step=tokens_per_step)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve(scripted("hi")) as served, httpx.Client(base_url=served.url) as http:
        yield http


def accumulated(chunks: Any) -> list[dict[str, Any]]:
    """Messages and finishes by choice, put together as clients do, strictly."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            state = choices.setdefault(choice.index, {"content": "", "calls": [], "finish": None})
            assert state["finish"] is None, "a chunk after the last one"
            state["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(state["calls"])
                    assert piece.type == "function"
                    assert piece.function.arguments == ""
                    state["calls"].append([piece.id, piece.function.name, ""])
                else:
                    assert piece.index == len(state["calls"]) - 1
                    state["calls"][-1][2] += piece.function.arguments
            state["finish"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7, 500])
def test_streamed_and_whole_replies_say_the_same(tokens_per_step: int) -> None:
    """Content, calls, arguments and finish, whatever each step brought; ids are the reply's own."""
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
    """With one token per step an argument of some characters takes some chunks."""
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
    """Text, white space at both ends, half a tag: all of it content, finish "stop"."""
    text = " \n a <tool_call> that is none, and <tool \n"
    with serve(scripted(text)) as served, httpx.Client(base_url=served.url) as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        [choice] = http.post(CHAT, json=body).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_a_call_that_the_length_cuts() -> None:
    """What there is of the arguments arrives, and "length" says why they end."""
    with serve(scripted(CALLS)) as served, httpx.Client(base_url=served.url) as http:
        size = CALLS.encode().index(b"rich")
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "max_tokens": size}
        [choice] = http.post(CHAT, json=body).json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zü'}
        assert choice["finish_reason"] == "length"


def test_logprobs_of_calls() -> None:
    """Entries follow the generated text, calls and their tags too, streamed and whole alike."""
    with serve(scripted(CALLS, tokens_per_step=3)) as served:
        body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "logprobs": True}
        with httpx.Client(base_url=served.url) as http:
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
    """It may end the reply between two calls, whose tags it can name."""
    with serve(scripted(CALLS)) as served, httpx.Client(base_url=served.url) as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "stop": "</tool_call>"}
        [choice] = http.post(CHAT, json=body).json()["choices"]
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
        assert choice["finish_reason"] == "tool_calls"


def test_the_model_is_told_of_the_tools_unless_none_may_be_called() -> None:
    """tool_choice "none": no tools in the prompt, and what looks like a call is text."""
    with serve(scripted(CALLS)) as served, httpx.Client(base_url=served.url) as http:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        http.post(CHAT, json=body)
        told = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
        assert "get_weather" in told
        [choice] = http.post(CHAT, json={**body, "tool_choice": "none"}).json()["choices"]
        told = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
        assert "get_weather" not in told
        assert choice["message"]["content"] == CALLS
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


NAMED = {"type": "function", "function": {"name": "get_time"}}
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
def test_a_promise_is_a_grammar(fields: dict[str, Any], held: bool) -> None:
    """What a model alone would not keep is enforced; a free model is left alone."""
    client = scripted("hi")
    with serve(client) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, **fields}
        assert httpx.post(served.url + CHAT, json=body).is_success
    grammar = client.submitted[-1].params.grammar
    assert (grammar is not None) == held
    if grammar is not None and "tool_choice" in fields and fields["tool_choice"] != "required":
        assert "get_time" in grammar.source
        assert "get_weather" not in grammar.source


def test_only_allowed_tools_are_read_as_calls() -> None:
    """The model is told of all tools, so that its prompt can be cached, and may call these."""
    with serve(scripted(CALLS)) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": ALLOWED}
        [choice] = httpx.post(served.url + CHAT, json=body).json()["choices"]
        told = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
    assert "get_weather" in told
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_time"]


ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY, "strict": True}}


def test_a_format_beside_tools() -> None:
    """The reply is calls or an answer in the format: one grammar for both. If calls are required
    there is no answer to shape."""
    client = scripted("hi")
    with serve(client) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "response_format": ANSWER}
        for fields in ({}, {"response_format": {"type": "json_object"}}):
            assert httpx.post(served.url + CHAT, json={**body, **fields}).is_success
            grammar = client.submitted[-1].params.grammar
            assert grammar is not None
            assert grammar.source.startswith("start: content | ")
        for choice, said in (("required", "start: opening"), ("none", "{")):
            assert httpx.post(served.url + CHAT, json={**body, "tool_choice": choice}).is_success
            grammar = client.submitted[-1].params.grammar
            assert grammar is not None
            assert grammar.source.startswith(said)
        del body["response_format"]
        refused = httpx.post(
            served.url + CHAT, json={**body, "structured_outputs": {"regex": "a+"}}
        )
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
def test_strict_schemas_are_honoured_or_refused(tools: Any, param: str) -> None:
    """Never half: the tool whose schema cannot be enforced is named."""
    with serve(scripted("hi")) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": tools}
        reply = httpx.post(served.url + CHAT, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert "`properties.a.not`" in reply.json()["error"]["message"]


def test_a_schema_that_is_not_strict_is_a_hint() -> None:
    """What cannot be enforced of it is not, and the call still is; what can be is."""
    client = scripted("hi")
    with serve(client) as served:
        tools = [tool("hard", parameters=HARD), tool(strict=True)]
        body = {"model": MODEL, "messages": HELLO, "tools": tools, "tool_choice": "required"}
        assert httpx.post(served.url + CHAT, json=body).is_success
    grammar = client.submitted[-1].params.grammar
    assert grammar is not None
    assert "not" not in grammar.source
    assert '"city"' in grammar.source


def call(id: str, city: str, arguments: str | None = None) -> dict[str, Any]:
    said = json.dumps({"city": city, "unit": None}) if arguments is None else arguments
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": said}}


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_calls_and_results_reach_the_template() -> None:
    """Arguments as an object with its nulls, content of null as none, results in the order of
    their calls, since templates know them by their place alone."""
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
        def render(self, messages: Any, **options: Any) -> str:
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


def test_arguments_that_are_no_object_are_told_as_they_are() -> None:
    """A broken call must be sayable, or a model could never be told that it was broken."""
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call("a", "", '{"city": '), call("b", "", "")]},
        result("a", "that was no JSON"),
    ]
    with serve(scripted("ok")) as served:
        body = {"model": MODEL, "messages": messages}
        assert httpx.post(served.url + CHAT, json=body).is_success
        told = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
    assert json.dumps('{"city": ') in told
    assert '"arguments": {}' in told


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 80 + "]" * 80, "[" * 900 + "]" * 900])
def test_arguments_that_no_template_can_write(value: str) -> None:
    """Half of a surrogate pair and deep nesting were a 500; they are told as they are."""
    arguments = f'{{"city": {value}}}'
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call("a", "f", arguments)]}]
    with serve(scripted("ok")) as served:
        body = {"model": MODEL, "messages": messages}
        reply = httpx.post(served.url + CHAT, json=body)
        assert reply.is_success, reply.text
        told = bytes(i for i in served.client.submitted[-1].prompt if i < 256).decode()
    assert json.dumps(arguments) in told


def test_arguments_count_as_values_of_the_body(http: httpx.Client) -> None:
    """Eight megabytes of lists, written as the text of arguments, held every other stream."""
    calls = [call(str(i), "f", '{"a": [' + "[]," * 70_000 + "[]]}") for i in range(4)]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    reply = http.post(CHAT, json={"model": MODEL, "messages": messages})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert "JSON values" in reply.json()["error"]["message"]


def bad_tool(**fields: Any) -> list[Any]:
    return [{**tool(), **fields}]


def bad_function(**fields: Any) -> list[Any]:
    return [tool(**fields)]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": bad_tool(type="custom")}, "tools[0].type"),
    ({"tools": bad_tool(function="x")}, "tools[0].function"),
    ({"tools": bad_tool(extra=1)}, "tools[0].extra"),
    ({"tools": [*TOOLS, tool("x", extra=1)]}, "tools[2].function.extra"),
    ({"tools": bad_tool(function={})}, "tools[0].function.name"),
    ({"tools": bad_function(name=5)}, "tools[0].function.name"),
    ({"tools": bad_function(name="")}, "tools[0].function.name"),
    ({"tools": bad_function(name="a" * 65)}, "tools[0].function.name"),
    ({"tools": bad_function(name="get weather")}, "tools[0].function.name"),
    ({"tools": bad_function(name="get_weather\n")}, "tools[0].function.name"),
    ({"tools": bad_function(name="wetter_ä")}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": bad_function(description=5)}, "tools[0].function.description"),
    ({"tools": bad_function(description="x" * 20000)}, "tools[0].function.description"),
    ({"tools": bad_function(parameters="x")}, "tools[0].function.parameters"),
    ({"tools": bad_function(parameters={"type": "array"})}, "tools[0].function.parameters.type"),
    ({"tools": bad_function(parameters={"x": "y" * 70000})}, "tools[0].function.parameters"),
    ({"tools": bad_function(strict="yes")}, "tools[0].function.strict"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_time"}},
        "tool_choice.name",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": []},
            },
        },
        "tool_choice.allowed_tools.tools",
    ),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_tools(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """A 400 whose `param` is the path of what is wrong."""
    reply = http.post(CHAT, json={"model": MODEL, "messages": HELLO, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert f"`{param}" in error["message"]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ({"role": "user", "content": "x", "tool_calls": [call("a", "x")]}, "tool_calls"),
    ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
    ({"role": "assistant", "tool_calls": "x"}, "tool_calls"),
    ({"role": "assistant", "tool_calls": []}, "content"),
    ({"role": "assistant"}, "content"),
    ({"role": "assistant", "tool_calls": ["x"]}, "tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "a"}]}, "tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{**call("a", "x"), "id": None}]}, "tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [{**call("a", "x"), "id": 5}]}, "tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [call("a", "x"), call("a", "y")]}, "tool_calls"),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]},
        "tool_calls[0].function",
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]},
        "tool_calls[0].function.name",
    ),
    (
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}],
        },
        "tool_calls[0].function.arguments",
    ),
    ({"role": "tool", "content": "x"}, "tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
    ({"role": "tool", "tool_call_id": "a"}, "content"),
    ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call"),
]


@pytest.mark.parametrize(("message", "param"), BAD_MESSAGES)
def test_bad_messages(http: httpx.Client, message: Any, param: str) -> None:
    """Calls and results that do not fit together, by path."""
    reply = http.post(CHAT, json={"model": MODEL, "messages": [*HELLO, message]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"messages[1].{param}"


def test_a_call_is_answered_once(http: httpx.Client) -> None:
    """A second result of one call, or one of a call of an earlier turn, is a mistake."""
    asked = {"role": "assistant", "tool_calls": [call("a", "Rome")]}
    for messages, index in (
        ([*HELLO, asked, result("a", "1"), result("a", "2")], 3),
        ([*HELLO, asked, result("a", "1"), *HELLO, result("a", "2")], 4),
    ):
        reply = http.post(CHAT, json={"model": MODEL, "messages": messages})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == f"messages[{index}].tool_call_id"


class Deaf(ByteTokenizer):
    """A template that leaves tools out."""

    def render(self, messages: Any, *, tools: Any = None, **options: Any) -> str:
        return super().render(messages, **options)


class Foreign(ByteTokenizer):
    """A template whose calls are in no form that is known here."""

    def render(self, messages: Any, **options: Any) -> str:
        return super().render(messages, **options).replace("<tool_call>", "[TOOL_CALLS]")


@pytest.mark.parametrize(
    ("tokenizer", "settings", "said"),
    [
        (Deaf(), {}, "does not know tools"),
        (Deaf(), {"tool_parser": "hermes"}, "does not know tools"),
        (Foreign(), {}, "server.tool_parser"),
        (ByteTokenizer(), {"tool_parser": "none"}, "switched off"),
    ],
)
def test_models_that_cannot_be_offered_tools(
    tokenizer: ByteTokenizer, settings: dict[str, Any], said: str
) -> None:
    """A clear refusal, and never tools that silently reach nobody."""
    with serve(scripted("hi"), tokenizer=tokenizer, **settings) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        error = httpx.post(served.url + CHAT, json=body).json()["error"]
        assert error["param"] == "tools"
        assert said in error["message"]
        body["tools"] = []
        assert httpx.post(served.url + CHAT, json=body).is_success


def test_the_parser_may_be_named() -> None:
    """`server.tool_parser` wins over what the template shows."""
    text = '{"name": "get_time", "parameters": {"city": "Rome"}}'
    with serve(scripted(text), tool_parser="llama3_json", tokenizer=Foreign()) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        [choice] = httpx.post(served.url + CHAT, json=body).json()["choices"]
    [made] = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_time", "arguments": '{"city": "Rome"}'}
    assert choice["message"]["content"] is None


class Tagged(ByteTokenizer):
    """Llama's form of calls, with its tag as a special token, which leaves no text."""

    TAG = 300

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text == "<|python_tag|>":
            return [self.TAG]
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        return b"<|python_tag|>" if token == self.TAG else super().token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token == self.TAG or super().is_special(token)

    def render(self, messages: Any, **options: Any) -> str:
        text = super().render(messages, **options)
        return text.replace('"arguments"', '"parameters"').replace("tool_call>", "call>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tag_that_leaves_no_text_is_seen(stream: bool) -> None:
    """The parser sees the special token before a call; the client never does, unless it asks for
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
        told = reply(called, skip_special_tokens=skip)
        assert told == (None, [("get_time", '{"city": "Rome"}')])
    assert reply("print(1)") == ("print(1)", [])
    assert reply("print(1)", skip_special_tokens=False) == ("<|python_tag|>print(1)", [])


def test_every_token_is_told_once_whatever_the_chunks_are() -> None:
    """Ids and provenance of a reply with calls, streamed and whole, are those of all its tokens."""
    with serve(scripted(CALLS, tokens_per_step=3)) as served:
        body = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "return_token_ids": True}
        body["provenance"] = True
        with httpx.Client(base_url=served.url) as http:
            [choice] = http.post(CHAT, json=body).json()["choices"]
            text = http.post(CHAT, json={**body, "stream": True}).text
    assert choice["token_ids"] == [*CALLS.encode(), EOS]
    told: dict[str, list[Any]] = {"token_ids": [], "provenance": []}
    for line in text.splitlines():
        if line.startswith("data: {"):
            [piece] = json.loads(line.removeprefix("data: "))["choices"]
            for name, entries in told.items():
                entries += piece.get(name) or []
    assert told["token_ids"] == choice["token_ids"]
    assert told["provenance"] == choice["provenance"]
    assert len(told["provenance"]) > 0
