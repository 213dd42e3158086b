"""/tokenize and /detokenize: vLLM's shapes, chat's prompt, limits, and no need of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.byte_tokenizer import BOS, IM_START, ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeClient()) as served:
        yield served


def ask(http: httpx.Client, **fields: Any) -> Any:
    reply = http.post("/tokenize", json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_prompt(http: httpx.Client) -> None:
    """The ids that /v1/completions would run, with their count, in vLLM's shape."""
    assert ask(http, model=MODEL, prompt="hé") == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, *"hé".encode()],
        "token_strs": None,
    }
    assert ask(http, prompt="hi", add_special_tokens=False)["tokens"] == list(b"hi")
    strings = ask(http, prompt="hé", return_token_strs=True)["token_strs"]
    assert strings == ["<|bos|>", "h", "bytes:\\xc3", "bytes:\\xa9"]
    assert ask(http, prompt="", add_special_tokens=False)["count"] == 0


def test_messages_are_what_chat_runs(served: Served, http: httpx.Client) -> None:
    """Law: tokens and count equal those of the same messages in /v1/chat/completions."""
    plain = ask(http, messages=HELLO)
    reply = http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "max_tokens": 1}
    )
    assert plain["tokens"] == served.client.submitted[-1].prompt
    assert plain["count"] == reply.json()["usage"]["prompt_tokens"]
    tool = {"type": "function", "function": {"name": "look_up"}}
    with_tools = ask(http, messages=HELLO, tools=[tool])
    http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HELLO, "tools": [tool], "max_tokens": 1},
    )
    assert served.client.submitted[-1].prompt == with_tools["tokens"]
    assert with_tools["count"] > plain["count"]
    bare = ask(http, messages=HELLO, add_generation_prompt=False)["tokens"]
    assert plain["tokens"][: len(bare)] == bare
    assert plain["tokens"][len(bare)] == IM_START
    assert ask(http, messages=HELLO, add_special_tokens=True)["tokens"] == [BOS, *plain["tokens"]]


@pytest.mark.parametrize("text", ["", "a", "x<|im_start|>y", "日本語 🙂", "\n\t"])
def test_detokenize_inverts_tokenize(http: httpx.Client, text: str) -> None:
    """Law: detokenizing a text's tokens gives the text, special tokens spelled out."""
    tokens = ask(http, prompt=text, add_special_tokens=False)["tokens"]
    for path in ("/detokenize", "/v1/detokenize"):
        reply = http.post(path, json={"model": MODEL, "tokens": tokens})
        assert reply.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_field"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages", "invalid_value"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt",
            "invalid_value",
        ),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": HELLO, "tools": "x"}, "tools", "invalid_value"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools[0].type", "invalid_value"),
        (
            "/tokenize",
            {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "invalid_value",
        ),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template", "unsupported_field"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature", "unknown_field"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", None),
        ("/tokenize", {"prompt": "a" * 20_000}, "prompt", "context_length_exceeded"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model", "model_not_found"),
        ("/detokenize", {}, "tokens", "missing_field"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [258]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens", "context_length_exceeded"),
        ("/detokenize", {"tokens": [1], "model": "b"}, "model", "model_not_found"),
    ],
)
def test_bad_input_is_named(
    http: httpx.Client, path: str, body: Any, param: str, code: str | None
) -> None:
    """A 400 (404 for a model) names the field; text that cannot fit is not tokenised."""
    reply = http.post(path, json=body)
    assert reply.status_code == (404 if code == "model_not_found" else 400), reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert code is None or error["code"] == code


def test_no_chat_template() -> None:
    """Messages need one; a prompt does not."""
    with serve(FakeClient(), tokenizer=ByteTokenizer(chat=None)) as served:
        refused = httpx.post(f"{served.url}/tokenize", json={"messages": HELLO})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert httpx.post(f"{served.url}/tokenize", json={"prompt": "a"}).is_success


def test_the_engine_need_not_run() -> None:
    """Until the engine was first ready the context length is unknown: 503. Later it may be down."""
    client = FakeClient(state="lost")
    with serve(client) as served:
        assert httpx.post(f"{served.url}/tokenize", json={"prompt": "a"}).is_success
        assert client.steps == 0
        client.ready = None
        unknown = httpx.post(f"{served.url}/v1/tokenize", json={"prompt": "a"})
        assert unknown.status_code == 503
        assert unknown.headers["retry-after"]


CHAT_ONLY: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"messages": [*HELLO, {"role": "assistant", "content": "So"}], "continue_final_message": True},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"reasoning_effort": "low"},
]


@pytest.mark.parametrize("fields", CHAT_ONLY)
def test_what_shapes_a_chat_prompt_shapes_the_count(fields: dict[str, Any]) -> None:
    """Law: the tokens are those that /v1/chat/completions runs; beside a prompt it is refused."""
    tokenizer = ByteTokenizer(reads=("enable_thinking", "reasoning_effort"))
    with serve(FakeClient(), tokenizer=tokenizer) as served:
        body = {"messages": HELLO, **fields}
        tokens = httpx.post(f"{served.url}/tokenize", json=body).json()["tokens"]
        chat = {"model": MODEL, "max_tokens": 1, **body}
        assert httpx.post(f"{served.url}/v1/chat/completions", json=chat).is_success
        assert served.client.submitted[-1].prompt == tokens
        beside = {**fields, "prompt": "a"}
        reply = httpx.post(f"{served.url}/tokenize", json=beside)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] in fields
