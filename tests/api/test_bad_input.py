"""Bad input: a 4xx in the OpenAI envelope that names the field; never a 5xx, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.api.errors import ApiError
from server.api.schema import CompletionRequest
from server.errors import ChatTemplateError
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.serving import MODEL, Served, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SECRET = "a-private-sentence"

COMMON_BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", -0.1, "min_p"),
    ("min_p", 1.1, "min_p"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", 10**9, "n"),
    ("n", 10**400, "n"),
    ("n", True, "n"),
    ("n", "3", "n"),
    ("n", 1.5, "n"),
    ("max_tokens", 2**31, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("seed", 2**64, "seed"),
    ("seed", -(2**63) - 1, "seed"),
    ("seed", 1.5, "seed"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 11, "repetition_penalty"),
    ("stop", 5, "stop"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a", 1], "stop[1]"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", "x" * 257, "stop"),
    ("stop", ["ab"] * 10_000, "stop"),
    ("stop", [""], "stop[0]"),
    ("stop_token_ids", 5, "stop_token_ids"),
    ("stop_token_ids", [258], "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [True], "stop_token_ids[0]"),
    ("stop_token_ids", [1] * 65, "stop_token_ids"),
    ("logit_bias", [], "logit_bias"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"258": 1}, "logit_bias"),
    ("logit_bias", {"99999999999": 1}, "logit_bias"),
    ("logit_bias", {"7": 1, "007": -1}, "logit_bias"),
    ("logit_bias", {"1": 101}, "logit_bias.1"),
    ("logit_bias", {"1": "5"}, "logit_bias.1"),
    ("logit_bias", {"1": False}, "logit_bias.1"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
    ("stream", "yes", "stream"),
    ("stream", 1, "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", 3, "stream_options"),
    ("ignore_eos", "no", "ignore_eos"),
    ("skip_special_tokens", 0, "skip_special_tokens"),
    ("include_stop_str_in_output", "x", "include_stop_str_in_output"),
    ("cache_salt", 5, "cache_salt"),
    ("cache_salt", "x" * 513, "cache_salt"),
    ("priority", 1.5, "priority"),
    ("priority", 2**31, "priority"),
    ("priority", "high", "priority"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", True, "prompt_logprobs"),
    ("return_token_ids", 1, "return_token_ids"),
    ("user", 5, "user"),
    ("metadata", "x", "metadata"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("metadata", {"a": "x" * 513}, "metadata.a"),
    ("metadata", {"k" * 65: "x"}, f"metadata.{'k' * 64}"),
    ("metadata", {str(i): "" for i in range(17)}, "metadata"),
    ("store", "yes", "store"),
    ("service_tier", "platinum", "service_tier"),
    ("service_tier", 1, "service_tier"),
    ("model", 5, "model"),
    ("frobnicate", 1, "frobnicate"),
    ("guided_json", 3, "guided_json"),
    ("tools", "look_up", "tools"),
    ("tool_choice", "required", "tool_choice"),
    ("functions", [{}], "functions"),
    ("function_call", "auto", "function_call"),
    ("parallel_tool_calls", 0, "parallel_tool_calls"),
    ("prediction", "x", "prediction"),
    ("prediction", {"type": "text", "content": "x"}, "prediction.type"),
    ("prediction", {"content": "x"}, "prediction.type"),
    ("prediction", {"type": "content"}, "prediction.content"),
    ("prediction", {"type": "content", "content": ""}, "prediction.content"),
    ("prediction", {"type": "content", "content": []}, "prediction.content"),
    ("prediction", {"type": "content", "content": 5}, "prediction.content"),
    ("prediction", {"type": "content", "content": ["x"]}, "prediction.content[0]"),
    (
        "prediction",
        {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
        "prediction.content[0].type",
    ),
    (
        "prediction",
        {"type": "content", "content": [{"type": "text", "text": "x", "more": 1}]},
        "prediction.content[0].more",
    ),
    ("prediction", {"type": "content", "content": "x", "more": 1}, "prediction.more"),
    ("prediction", {"type": "content", "content": "x" * 513}, "prediction.content"),
    ("prediction", {"type": "content", "content": "x" * 90_000}, "prediction.content"),
    ("speculation", True, "speculation"),
    ("speculation", [], "speculation"),
    ("speculation", {"enable": True}, "speculation.enable"),
    ("speculation", {"enabled": 1}, "speculation.enabled"),
    ("speculation", {"enabled": "yes"}, "speculation.enabled"),
    ("speculation", {"enabled": False, "max_draft": 4}, "speculation.max_draft"),
    ("speculation", {"enabled": False, "max_draft": 0}, "speculation.max_draft"),
    ("speculation", {"enabled": False, "max_draft": "auto"}, "speculation.max_draft"),
    ("speculation", {"enabled": False, "proposers": ["ngram"]}, "speculation.proposers"),
    ("speculation", {"max_draft": 0, "proposers": ["ngram"]}, "speculation.proposers"),
    ("speculation", {"max_draft": -1}, "speculation.max_draft"),
    ("speculation", {"max_draft": 5}, "speculation.max_draft"),
    ("speculation", {"max_draft": 10**30}, "speculation.max_draft"),
    ("speculation", {"max_draft": 1.0}, "speculation.max_draft"),
    ("speculation", {"max_draft": True}, "speculation.max_draft"),
    ("speculation", {"max_draft": "most"}, "speculation.max_draft"),
    ("speculation", {"proposers": "ngram"}, "speculation.proposers"),
    ("speculation", {"proposers": []}, "speculation.proposers"),
    ("speculation", {"proposers": ["ngram"] * 20}, "speculation.proposers"),
    ("speculation", {"proposers": ["ngram", "ngram"]}, "speculation.proposers[1]"),
    ("speculation", {"proposers": ["ngram", "oracle"]}, "speculation.proposers[1]"),
    ("speculation", {"proposers": [{}]}, "speculation.proposers[0]"),
    ("speculation", {"proposers": ["grammar"]}, "speculation.proposers[0]"),
    ("provenance", "yes", "provenance"),
    ("provenance", 1, "provenance"),
    ("audio", {}, "audio"),
    ("modalities", ["text", "audio"], "modalities"),
    ("reasoning_effort", "high", "reasoning_effort"),
    ("verbosity", "low", "verbosity"),
    ("verbosity", ["medium"], "verbosity"),
    ("web_search_options", {}, "web_search_options"),
]

COMPLETION_BAD: list[tuple[str, Any, str]] = [
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", ["a", ""], "prompt[1]"),
    ("prompt", [[1], []], "prompt[1]"),
    ("prompt", 5, "prompt"),
    ("prompt", {"a": 1}, "prompt"),
    ("prompt", [1, "a"], "prompt"),
    ("prompt", [1.5], "prompt"),
    ("prompt", [True], "prompt"),
    ("prompt", [None], "prompt"),
    ("prompt", None, "prompt"),
    ("prompt", [1, 258], "prompt"),
    ("prompt", [-1], "prompt"),
    ("prompt", [10**30], "prompt"),
    ("prompt", [[1], [300]], "prompt[1]"),
    ("prompt", ["a"] * 129, "prompt"),
    ("logprobs", -1, "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("echo", "yes", "echo"),
    ("best_of", 0, "best_of"),
    ("best_of", 129, "best_of"),
    ("best_of", True, "best_of"),
    ("suffix", 5, "suffix"),
    ("suffix", ["x"], "suffix"),
    ("max_tokens", -1, "max_tokens"),
    ("messages", HELLO, "messages"),
    ("max_completion_tokens", 5, "max_completion_tokens"),
    ("top_logprobs", 5, "top_logprobs"),
    ("min_tokens", 17, "min_tokens"),  # more than the default of max_tokens
]

CHAT_BAD: list[tuple[str, Any, str]] = [
    ("messages", [], "messages"),
    ("messages", "hello", "messages"),
    ("messages", None, "messages"),
    ("messages", ["hello"], "messages[0]"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": 5, "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ("messages", [{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
    ("messages", [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{}]}],
     "messages[1].tool_calls[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
     "messages[0].content[0].type"),
    ("messages", [*HELLO, {"role": "user", "content": [{"type": "text", "text": "x"},
                                                       {"type": "input_audio"}]}],
     "messages[1].content[1].type"),
    ("messages", [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}],
     "messages[0].content[0].type"),
    ("messages", [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}],
     "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": "x", "refusal": "y"}], "messages[0].refusal"),
    ("messages", [{"role": "assistant", "content": "x", "refusal": "y"}], "messages[0].refusal"),
    ("messages", [{"role": "assistant", "refusal": 5}], "messages[0].refusal"),
    ("messages", [{"role": "function", "name": "f", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "assistant", "content": "x", "audio": {"id": "a"}}],
     "messages[0].audio"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}],
     "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}],
     "messages[0].content[0].y"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x",
                                                "prompt_cache_breakpoint": {"mode": "explicit"}}]}],
     "messages[0].content[0].prompt_cache_breakpoint"),
    ("messages", [{"role": "user", "content": [{"type": 5, "text": "x"}]}],
     "messages[0].content[0].type"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("logprobs", 5, "logprobs"),
    ("top_logprobs", 5, "top_logprobs"),  # without logprobs: true
    ("continue_final_message", "yes", "continue_final_message"),
    ("continue_final_message", True, "messages[0]"),  # the last message is the user's
    ("add_generation_prompt", 1, "add_generation_prompt"),
    ("chat_template", "{{ messages }}", "chat_template"),
    ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("chat_template_kwargs", {str(i): 1 for i in range(17)}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"enable_thinking": {}}, "chat_template_kwargs.enable_thinking"),
    ("reasoning_effort", "enormous", "reasoning_effort"),
    ("reasoning_effort", 5, "reasoning_effort"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("prompt", "hello", "prompt"),
    ("echo", True, "echo"),
    ("best_of", 1, "best_of"),
    ("suffix", "x", "suffix"),
]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_body_bytes=100_000) as served:
        yield served


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert "pydantic" not in error["message"]
    return dict(error)


def check(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    error = error_of(http.post(path, json=body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert f"`{param.partition('.')[0].partition('[')[0]}" in error["message"]


@pytest.mark.parametrize(("field", "value", "param"), COMMON_BAD + COMPLETION_BAD)
def test_completions(http: httpx.Client, field: str, value: Any, param: str) -> None:
    """Each of these was silently ignored, coerced, or a 500 in some server."""
    check(http, COMPLETIONS, {"model": MODEL, "prompt": "hello", field: value}, param)


@pytest.mark.parametrize(("field", "value", "param"), COMMON_BAD + CHAT_BAD)
def test_chat(http: httpx.Client, field: str, value: Any, param: str) -> None:
    """The same law for chat."""
    check(http, CHAT, {"model": MODEL, "messages": HELLO, field: value}, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "a", "prompt": "\\ud800"}',
        b"[" * 5000,
        b'{"a":' * 5000,
    ],
)
def test_malformed_json(http: httpx.Client, body: bytes) -> None:
    """Bytes that are not a JSON object get a 400 that says so."""
    error = error_of(http.post(COMPLETIONS, content=body), 400)
    assert error["code"] == "invalid_json"
    assert "JSON" in error["message"]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "n", "seed", "user"])
def test_fields_refuse_nan_and_infinity(http: httpx.Client, field: str, number: str) -> None:
    """Python's json writes NaN and Infinity, and 1e999 reads as infinity. The reply names the
    field; it used to name a column of the body."""
    body = f'{{"model": "{MODEL}", "prompt": "a", "{field}": {number}}}'
    error = error_of(http.post(COMPLETIONS, content=body), 400)
    assert error["param"] == field
    assert "must be" in error["message"]


def test_the_refusal_of_nan_is_in_plain_words(http: httpx.Client) -> None:
    """Bug: for a field of several types the validator's raw message appeared in our sentence."""
    body = f'{{"model": "{MODEL}", "messages": [], "chat_template_kwargs": {{"a": NaN}}}}'
    text = error_of(http.post(CHAT, content=body.replace("[]", json.dumps(HELLO))), 400)["message"]
    allowed = "true or false or an integer or a number or a string"
    assert text == f"`chat_template_kwargs.a` must be {allowed}, but NaN was given"


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity"])
def test_entries_of_fields_refuse_nan_and_infinity(http: httpx.Client, number: str) -> None:
    """The same law for the entries of lists and objects."""
    for field, text, param in (
        ("logit_bias", f'{{"5": {number}}}', "logit_bias.5"),
        ("prompt", f"[{number}]", "prompt"),
        ("stop", f"[{number}]", "stop[0]"),
        ("metadata", f'{{"a": {number}}}', "metadata.a"),
        ("foo", number, "foo"),
    ):
        prompt = "" if field == "prompt" else '"prompt": "a", '
        body = f'{{"model": "{MODEL}", {prompt}"{field}": {text}}}'
        assert error_of(http.post(COMPLETIONS, content=body), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 10**30}, "an integer from 1 to 2147483647, but 1000"),
        ({"max_completion_tokens": 2**31}, "from 1 to 2147483647, but 2147483648 was given"),
        ({"n": 129}, "must be an integer from 1 to 128, but 129 was given"),
        ({"logprobs": 21}, "`logprobs` must be true or false, but 21 was given"),
        ({"stop": [""]}, "`stop[0]` must be a string that is not empty, but an empty string was"),
        ({"user": "x" * 513}, "of at most 512 characters, but a string of 513 characters was"),
        ({"guided_regex": ""}, "must be a string that is not empty, but an empty string was given"),
        ({"temperature": "0.7"}, 'a number from 0 to 2, but "0.7" was given'),
        ({"temperature": "as warm as it was"}, "but a string of 17 characters was given"),
        (
            {"stream": "größer\x1b[31m"},
            '`stream` must be true or false, but "gr\\u00f6\\u00dfer\\u001b[',
        ),
        ({"reasoning_effort": "größer"}, '"max", but "größer" was given'),
        ({"reasoning_effort": "x" * 41}, f'but "{"x" * 37}..." was given'),
        ({"reasoning_effort": "x" * 257}, "but a string of 257 characters was given"),
        ({"response_format": {"type": "xml"}}, 'but "xml" was given: nothing else is supported'),
        ({"tool_choice": "always"}, 'but "always" was given'),
        ({"messages": [{"role": "robot", "content": "x"}]}, 'but "robot" was given'),
        ({"messages": "hello"}, "but a string of 5 characters was given"),
        ({"messages": [*HELLO, "x"]}, "must be an object, but a string of 1 character was given"),
        ({"metadata": {"k" * 65: "x"}}, "has a name of 65 characters, and at most 64 are allowed"),
        ({"metadata": {str(i): "" for i in range(17)}}, "but an object of 17 members was given"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "`stream_options.include_obfuscation` must be false, but true was given",
        ),
    ],
)
def test_the_sentence_says_what_is_wrong(
    http: httpx.Client, fields: dict[str, Any], sentence: str
) -> None:
    """Bug: the sentence misled: 10**30 had to be `at least 1`, 513 characters to be a string of at
    most 512, `true` to be `False`, and `logprobs` was held to the bounds of two endpoints."""
    error = error_of(http.post(CHAT, json={"model": MODEL, "messages": HELLO, **fields}), 400)
    assert sentence in error["message"]


def test_a_length_beyond_the_context_names_its_own_field(http: httpx.Client) -> None:
    """Bug: `max_tokens` alone exceeded the context, but `param` blamed the prompt."""
    for route, field in ((COMPLETIONS, "max_tokens"), (CHAT, "max_completion_tokens")):
        body: dict[str, Any] = {"model": MODEL, field: 512}
        prompt: dict[str, Any] = {"prompt": "a"} if route == COMPLETIONS else {"messages": HELLO}
        error = error_of(http.post(route, json=body | prompt), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == field


def test_a_prompt_that_fills_the_context(http: httpx.Client) -> None:
    """Too many tokens are refused as context_length_exceeded, with the numbers."""
    error = error_of(http.post(COMPLETIONS, json={"model": MODEL, "prompt": [1] * 512}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


def test_a_text_that_cannot_fit_is_not_tokenised(http: httpx.Client) -> None:
    """A text with more bytes than context times longest token is refused without tokenising."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET * 2000}]}
    error = error_of(http.post(CHAT, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "bytes" in error["message"]
    assert SECRET not in error["message"]


def test_a_named_length_must_fit_a_default_is_clipped(served: Served, http: httpx.Client) -> None:
    """An explicit max_tokens is a promise: it fits or is refused. A default is clipped to fit."""
    body = {"model": MODEL, "prompt": [1] * 505, "max_tokens": 8}
    error = error_of(http.post(COMPLETIONS, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "513" in error["message"]
    reply = http.post(COMPLETIONS, json={"model": MODEL, "prompt": [1] * 505})
    assert reply.json()["usage"]["completion_tokens"] == 7
    assert served.client.submitted[-1].params.max_tokens == 7


def test_unknown_model(http: httpx.Client) -> None:
    """An unknown model name is a 404, as with OpenAI, and the message repeats the name."""
    error = error_of(http.post(COMPLETIONS, json={"model": "gpt-4o", "prompt": "a"}), 404)
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]
    assert "`gpt-4o`" in error["message"]
    long = error_of(http.post(COMPLETIONS, json={"model": "m" * 9999, "prompt": "a"}), 404)
    assert len(long["message"]) < 300
    assert error_of(http.get("/v1/models/gpt-4o"), 404)["code"] == "model_not_found"


def test_several_unknown_fields_are_all_named(http: httpx.Client) -> None:
    """One reply names all unknown fields."""
    body = {"model": MODEL, "prompt": "a", "one": 1, "two": 2}
    message = error_of(http.post(COMPLETIONS, json=body), 400)["message"]
    assert "`one`" in message
    assert "`two`" in message


def test_unknown_route_and_wrong_method(http: httpx.Client) -> None:
    """What the framework itself refuses also comes in the envelope."""
    assert error_of(http.get("/v2/nothing"), 404)["code"] == "unknown_route"
    reply = http.get(COMPLETIONS)
    assert error_of(reply, 405)["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


def test_body_too_large(http: httpx.Client) -> None:
    """The cap holds with and without a Content-Length."""
    body = json.dumps({"model": MODEL, "prompt": "a" * 200_000}).encode()
    assert error_of(http.post(COMPLETIONS, content=body), 413)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    assert error_of(http.post(COMPLETIONS, content=pieces()), 413)["code"] == "body_too_large"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": SECRET, "temperature": 9},
        {"prompt": [SECRET, 1]},
        {"prompt": "a", "stop": [SECRET, 1]},
        {"prompt": "a", "user": {SECRET: 1}},
        {"prompt": "a", "temperature": SECRET},
        {"prompt": "a", "suffix": SECRET},
    ],
)
def test_errors_do_not_repeat_what_users_wrote(http: httpx.Client, body: dict[str, Any]) -> None:
    """Error texts end up in logs; prompts must not."""
    assert SECRET not in http.post(COMPLETIONS, json={"model": MODEL, **body}).text


def test_refusals_are_counted_and_nothing_reached_the_engine(http: httpx.Client) -> None:
    """The operator sees refusals by reason."""

    def count() -> float:
        lines = http.get("/metrics").text.splitlines()
        name = 'foredraft_rejected_requests_total{reason="invalid"}'
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = count()
    http.post(COMPLETIONS, json={"model": MODEL})
    assert count() == before + 1


class Strict(ByteTokenizer):
    """A chat template that refuses all messages, and a decoder and an encoder with a bug."""

    def render(self, messages: Any, /, **options: Any) -> str:
        raise ChatTemplateError("roles must alternate")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text == SECRET:
            raise RuntimeError(f"cannot encode {text}")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        raise RuntimeError(SECRET)


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    with (
        serve(tokenizer=Strict()) as served,
        served.http() as http,
    ):
        yield http


def test_messages_that_the_template_refuses(strict: httpx.Client) -> None:
    """Messages that the chat template rejects are a 400 with the template's own words."""
    error = error_of(strict.post(CHAT, json={"model": MODEL, "messages": HELLO}), 400)
    assert error["param"] == "messages"
    assert "alternate" in error["message"]


def test_an_internal_error_is_a_500_without_details(strict: httpx.Client) -> None:
    """Neither a traceback nor any of the request leaves, streamed or not; no [DONE] either."""
    reply = strict.post(COMPLETIONS, json={"model": MODEL, "prompt": SECRET})
    assert error_of(reply, 500)["type"] == "server_error"
    assert SECRET not in reply.text
    body = {"model": MODEL, "prompt": "a", "stream": True}
    text = strict.post(COMPLETIONS, json=body).text
    assert '"code":"internal"' in text
    assert SECRET not in text
    assert "[DONE]" not in text


def test_an_unknown_field_that_is_null_is_left_out() -> None:
    """Law: a null for an unknown field is ignored (docs/api.md); any other value is refused."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "nonsense": None}
    assert CompletionRequest.read(body).prompt == ("x",)
    with pytest.raises(ApiError, match="unknown field `nonsense`"):
        CompletionRequest.read(body | {"nonsense": False})
