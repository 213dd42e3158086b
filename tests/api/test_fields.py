"""The table of fields stays true: every row is sent to the server and does what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.messages import Grammar, Speculation
from server.api.field_table import ROWS, TABLES
from server.api.fields import in_words
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": MODEL, "prompt": "hi", "max_tokens": 4},
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "responses": {"model": MODEL, "input": "hi", "max_output_tokens": 4},
    "messages": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
PATHS: dict[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
# A value other than the default, per field and, where it matters, per endpoint. Numbers that are
# not named have one of their bounds.
GOOD: dict[str, Any] = {
    "model": MODEL,
    "prompt": [[104, 105], [106]],
    "messages": [{"role": "developer", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 3,
    "max_completion_tokens": 4,
    "n": 2,
    "best_of": 3,
    "suffix": "x",
    "priority": -3,
    "timeout": 60,
    "prompt_logprobs": 2,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["zz", "yy"],
    "top_p": 0.9,
    "seed": -5,
    "logit_bias": {"0": -100, "257": 100},
    "logprobs": {"completions": 20, "chat": True},
    "top_logprobs": 20,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "high",
    "echo": True,
    "top_k": 3,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [7, 8],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "cache_salt": "tenant",
    "prediction": {"type": "content", "content": "ab"},
    "speculation": {"max_draft": 2, "proposers": ["ngram"]},
    "provenance": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["yes", "no"]},
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "flex",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "resume": {"token_ids": [98], "seed": 7},
    "request_id": "mine-1",
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_decoding_backend": "xgrammar",
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 1,
    "add_special_tokens": False,
    "include_reasoning": False,
    "separate_reasoning": False,
    "stream_reasoning": False,
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
GOOD |= {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}
NEEDED: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
    "stream_options": {"stream": True},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "hi"}]},
    "top_logprobs": {"logprobs": True},
}
# What reaches the engine, where it is not the value of the request.
ON_THE_WIRE: dict[str, Any] = {
    "seed": 2**64 - 5,
    "logit_bias": {0: -100.0, 257: 100.0},
    "stop_token_ids": (7, 8),
    "prediction": (97, 98),
    "speculation": Speculation(max_draft=2, proposers=("ngram",)),
    "response_format": Grammar("json_object"),
    "structured_outputs": Grammar("choice", '["yes", "no"]'),
    "guided_json": Grammar("json_schema", '{"type": "object"}'),
    "guided_regex": Grammar("regex", "a+"),
    "guided_choice": Grammar("choice", '["a", "b"]'),
    "guided_grammar": Grammar("lark", 'start: "a"'),
}
SHAPES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
          "guided_grammar")  # fmt: skip
NAMES = dict.fromkeys(SHAPES, "grammar")  # of SamplingParams

# Where /v1/responses has another shape.
LOGPROBS = {"include": ["message.output_text.logprobs"]}
FLAT = [{"type": "function", "name": "look_up", "parameters": {"type": "object"}}]
GOOD_RESPONSES: dict[str, Any] = {
    "input": [{"role": "developer", "content": [{"type": "input_text", "text": "hi"}]}],
    "instructions": "Be brief.",
    "max_output_tokens": 3,
    "stream_options": {"include_obfuscation": False},
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low", "summary": None},
    "tools": FLAT,
    "store": True,
    **LOGPROBS,
}
NEEDED_RESPONSES: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": FLAT},
    "parallel_tool_calls": {"tools": FLAT},
    "top_logprobs": LOGPROBS,
}

# Where /v1/messages has another shape.
CUSTOM = [{"name": "look_up", "input_schema": {"type": "object"}}]
GOOD_MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "system": [{"type": "text", "text": "Be brief."}],
    "stop_sequences": ["zz", "yy"],
    "tools": CUSTOM,
    "tool_choice": {"type": "auto"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "thinking": {"type": "disabled"},
    "metadata": {"user_id": "u"},
    "service_tier": "standard_only",
    "cache_control": {"type": "ephemeral"},
}
OTHER_SHAPES = {"responses": GOOD_RESPONSES, "messages": GOOD_MESSAGES}
OTHER_NEEDS: dict[str, dict[str, dict[str, Any]]] = {
    "responses": NEEDED_RESPONSES,
    "messages": {"tool_choice": {"tools": CUSTOM}},
}

NAMES_OF_ALL = sorted({name for endpoint in BODIES for name in ROWS[PATHS[endpoint]]})
CASES = [
    pytest.param(name, endpoint, id=f"{endpoint}-{name}")
    for name in NAMES_OF_ALL
    for endpoint in BODIES
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = ByteTokenizer(reads=("enable_thinking", "reasoning_effort"))
    with serve(FakeClient(), tokenizer=tokenizer, allow_priority=True) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:  # a loaded machine is slow
        yield http


def bound_of(name: str, endpoint: str) -> Any:
    """Return a bound of a number, other than the default; "anything" for another field."""
    field = TABLES[0][PATHS[endpoint]].model_fields.get(name)
    if field is None:
        return "anything"
    bounds = [
        getattr(one, end) for end in ("le", "ge") for one in field.metadata if hasattr(one, end)
    ]
    return next((bound for bound in bounds if bound != field.default), "anything")


def good_body(name: str, endpoint: str) -> dict[str, Any]:
    """Return a request with this field, with a valid value if the tests know one."""
    value, needed = GOOD.get(name, bound_of(name, endpoint)), NEEDED.get(name, {})
    if name == "logprobs":
        value = GOOD["logprobs"].get(endpoint, "anything")
    value = OTHER_SHAPES.get(endpoint, {}).get(name, value)
    needed = OTHER_NEEDS.get(endpoint, {}).get(name, needed)
    return {**BODIES[endpoint], name: value, **needed}


@pytest.mark.parametrize(("name", "endpoint"), CASES)
def test_every_row_does_what_it_says(
    served: Served, http: httpx.Client, name: str, endpoint: str
) -> None:
    """supported: reaches the engine; no-op: accepted; refused or absent: a 400 that names it."""
    row = ROWS[PATHS[endpoint]].get(name)
    body = good_body(name, endpoint)
    reply = http.post(PATHS[endpoint], json=body)
    if row is not None and row.kind != "refused":
        assert reply.status_code == 200, reply.text
        sent, own = served.client.submitted[-1].params, NAMES.get(name, name)
        if hasattr(sent, own) and name != "logprobs":  # in a chat not a number
            assert getattr(sent, own) == ON_THE_WIRE.get(name, body[name])
        return
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == name
    assert error["code"] == ("unknown_field" if row is None else "unsupported_field")


OPTIONAL = [
    pytest.param(name, endpoint, id=f"{endpoint}-{name}")
    for endpoint, body in BODIES.items()
    for name in ROWS[PATHS[endpoint]]
    if name not in body
]


@pytest.mark.parametrize(("name", "endpoint"), OPTIONAL)
def test_null_and_neutral_values_are_accepted(http: httpx.Client, name: str, endpoint: str) -> None:
    """SDKs send nulls and defaults for fields that the user never touched."""
    for value in (None, *ROWS[PATHS[endpoint]][name].neutral):
        reply = http.post(PATHS[endpoint], json={**BODIES[endpoint], name: value})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ROWS)
def test_every_row_says_what_is_allowed(path: str) -> None:
    """The allowed values are in words, from the declaration or from its schema."""
    for name, row in ROWS[path].items():
        assert row.allowed, name
        assert row.meaning.endswith("."), name


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "boolean"}, "true or false"),
        ({"enum": ["a", "b", "c"]}, '"a", "b" or "c"'),
        ({"type": "integer", "minimum": 1, "maximum": 9}, "an integer from 1 to 9"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "a number above 0 and up to 1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "a string"),
        ({"type": "string", "maxLength": 5}, "a string of at most 5 characters"),
    ],
)
def test_what_a_schema_admits(schema: dict[str, Any], words: str) -> None:
    """The words continue the sentence "must be ..."."""
    assert in_words(schema) == words


def test_a_schema_without_words_is_a_mistake() -> None:
    """A schema that cannot be put into words needs a declaration that has them."""
    with pytest.raises(TypeError, match="say in words"):
        in_words({"type": "object"})


def test_a_row_may_depend_on_the_settings() -> None:
    """`unless` is checked before anything else about the field."""
    with serve(FakeClient(), tokenizer=ByteTokenizer(chat=None)) as served:
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=BODIES["chat"])
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages")
        assert error["code"] == "unsupported_field"
        assert "no chat template" in error["message"]
        assert httpx.post(f"{served.url}/v1/completions", json=BODIES["completions"]).is_success


@pytest.mark.parametrize("path", ["chat/completions", "responses/input_tokens", "tokenize"])
def test_another_model_is_a_404_whatever_the_settings_refuse(path: str) -> None:
    """Law: `model` is checked first, as the settings are those of the model that is served."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"input" if path.startswith("responses") else "messages": messages}
    with serve(FakeClient(), tokenizer=ByteTokenizer(chat=None)) as served:
        url = f"{served.url}/v1/{path}"
        assert httpx.post(url, json={**body, "model": "other"}).status_code == 404
        error = httpx.post(url, json={**body, "model": MODEL}).json()["error"]
    assert error["code"] == "unsupported_field"
