"""The table of fields cannot drift: every row is sent to the server and does what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest

from engine.messages import Grammar, Speculation
from server.api.fields import FIELDS, ROWS, Endpoint, FieldRow
from server.api.schema import ChatRequest, CompletionRequest
from server.api.schema_responses import ResponsesRequest
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

BODIES: dict[Endpoint, dict[str, Any]] = {
    "completions": {"model": MODEL, "prompt": "hi", "max_tokens": 4},
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "responses": {"model": MODEL, "input": "hi", "max_output_tokens": 4},
}
PATHS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
}
SHARED = {name for name, row in ROWS["responses"].items() if row is ROWS["chat"].get(name)}
MODELS: dict[Endpoint, set[str]] = {
    "completions": set(CompletionRequest.model_fields),
    "chat": set(ChatRequest.model_fields),
    # What both have is handed on: it is chat's model that reads it.
    "responses": set(ResponsesRequest.model_fields) | (set(ChatRequest.model_fields) & SHARED),
}

# A value that is not the default, per field and (where it matters) endpoint.
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
    "prompt_logprobs": 2,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["zz", "yy"],
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": -5,
    "presence_penalty": -2,
    "frequency_penalty": 2.0,
    "logit_bias": {"0": -100, "257": 100},
    "logprobs": {"completions": 20, "chat": True},
    "top_logprobs": 20,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "high",
    "echo": True,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
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
ON_THE_WIRE: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 2**64 - 5,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {0: -100.0, 257: 100.0},
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": (7, 8),
    "cache_salt": "tenant",
    "priority": -3,
    "prompt_logprobs": 2,
    "prediction": (97, 98),
    "speculation": Speculation(max_draft=2, proposers=("ngram",)),
    "provenance": True,
    "response_format": Grammar("json_object"),
    "structured_outputs": Grammar("choice", '["yes", "no"]'),
}
NAMES = {"response_format": "grammar", "structured_outputs": "grammar"}  # of SamplingParams

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

CASES = [
    pytest.param(row, endpoint, id=f"{endpoint}-{row.name}")
    for row in FIELDS
    for endpoint in BODIES
    if row.status(endpoint) is not None or row.name not in ROWS[endpoint]
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = ByteTokenizer(reads=("enable_thinking", "reasoning_effort"))
    with serve(FakeClient(), tokenizer=tokenizer) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url) as http:
        yield http


def good_body(row: FieldRow, endpoint: Endpoint) -> dict[str, Any]:
    """A request with this field, and with a value for it if the tests know one."""
    value, needed = GOOD.get(row.name, "anything"), NEEDED.get(row.name, {})
    if row.name == "logprobs":
        value = GOOD["logprobs"].get(endpoint, "anything")
    if endpoint == "responses":
        value = GOOD_RESPONSES.get(row.name, value)
        needed = NEEDED_RESPONSES.get(row.name, needed)
    return {**BODIES[endpoint], row.name: value, **needed}


@pytest.mark.parametrize(("row", "endpoint"), CASES)
def test_every_row_does_what_it_says(
    served: Served, http: httpx.Client, row: FieldRow, endpoint: Endpoint
) -> None:
    """supported: reaches the engine; no-op: accepted; refused and absent: a 400 naming it."""
    status = row.status(endpoint)
    reply = http.post(PATHS[endpoint], json=good_body(row, endpoint))
    if status in ("supported", "no-op"):
        assert reply.status_code == 200, reply.text
        if row.name in ON_THE_WIRE:
            sent = served.client.submitted[-1].params
            assert getattr(sent, NAMES.get(row.name, row.name)) == ON_THE_WIRE[row.name]
        return
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == row.name
    assert error["code"] == ("unsupported_field" if status == "refused" else "unknown_field")


OPTIONAL = [
    pytest.param(row, endpoint, id=f"{endpoint}-{row.name}")
    for row in FIELDS
    for endpoint, body in BODIES.items()
    if row.status(endpoint) is not None and row.name not in body
]


@pytest.mark.parametrize(("row", "endpoint"), OPTIONAL)
def test_null_and_neutral_values_are_as_good_as_nothing(
    http: httpx.Client, row: FieldRow, endpoint: Endpoint
) -> None:
    """SDKs send nulls and defaults for fields that the user never touched."""
    for value in (None, *row.neutral):
        reply = http.post(PATHS[endpoint], json={**BODIES[endpoint], row.name: value})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("endpoint", BODIES)
def test_schema_and_table_name_the_same_fields(endpoint: Endpoint) -> None:
    """A field in the model that the table does not know, or the reverse, is a drift."""
    told = {r.name for r in FIELDS if r.status(endpoint) in ("supported", "no-op")}
    assert MODELS[endpoint] == told


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_names_are_unique(endpoint: Endpoint) -> None:
    """One row per name and endpoint."""
    names = [row.name for row in FIELDS if row.status(endpoint) is not None]
    assert len(names) == len(set(names))


def test_a_row_may_depend_on_the_settings() -> None:
    """`unless` is asked before anything else is done with the field."""
    with serve(FakeClient(), tokenizer=ByteTokenizer(chat=None)) as served:
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=BODIES["chat"])
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages")
        assert error["code"] == "unsupported_field"
        assert "no chat template" in error["message"]
        assert httpx.post(f"{served.url}/v1/completions", json=BODIES["completions"]).is_success
