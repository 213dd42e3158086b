"""/v1/responses: refusals name the wrong field of this API, in this API's words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.test_fields import FLAT, LOGPROBS
from tests.support.responses import BODY, RESPONSES, SAID

BAD = [
    ({"resume": {"token_ids": [1], "seed": 1}}, "resume", "unsupported_field"),
    ({"input": None}, "input", "missing_field"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": ["a"]}, "input[0]", "invalid_value"),
    ({"input": [{}]}, "input[0].type", "missing_field"),
    ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input", None),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_field"),
    ({"input": [{"type": ["message"]}]}, "input[0].type", "invalid_value"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": ["user"], "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_field"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "invalid_value"),
    ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]", "invalid_value"),
    ({"input": [{"role": "user", "content": "a", "name": "x"}]}, "input[0].name", "unknown_field"),
    ({"input": [{**SAID, "status": "done"}]}, "input[0].status", "invalid_value"),
    ({"input": [{**SAID, "id": 5}]}, "input[0].id", "invalid_value"),
    (
        {"input": [SAID, {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[1].content[0].type",
        "unsupported_field",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content[0].text",
        "invalid_value",
    ),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a", "logprobs": []}]}
            ]
        },
        "input[0].content[0].logprobs",
        "unknown_field",
    ),
    (
        {"input": [{"role": "user", "content": [{**SAID["content"][0], "x": 1}]}]},
        "input[0].content[0].x",
        "unknown_field",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "missing_field"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f f", "arguments": "{}"}]},
        "input[0].name",
        "invalid_value",
    ),
    (
        {"input": [SAID, {"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}]},
        "input[1].arguments",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
        "invalid_value",
    ),
    (
        {"input": [SAID, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[1].call_id",
        "invalid_value",
    ),
    ({"instructions": 5}, "instructions", "invalid_value"),
    ({"instructions": "x" * 20_000}, "instructions", "context_length_exceeded"),
    ({"instructions": "x" * 600}, "instructions", "context_length_exceeded"),
    ({"instructions": "x" * 90, "input": "x" * 600}, "input", "context_length_exceeded"),
    ({"instructions": "x" * 600, "input": []}, "input", "invalid_value"),
    ({"input": "x" * 20_000}, "input", "context_length_exceeded"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 600}, "max_output_tokens", "context_length_exceeded"),
    ({"max_output_tokens": 490}, "input", "context_length_exceeded"),
    ({"max_tokens": 5}, "max_tokens", "unknown_field"),
    ({"messages": []}, "messages", "unknown_field"),
    ({"n": 2}, "n", "unknown_field"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "invalid_value"),
    ({"include": ["file_search_call.results"]}, "include[0]", "invalid_value"),
    ({"include": [[]]}, "include[0]", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"text": {"format": {"type": "xml"}}}, None, None),
    ({"text": {"format": 5}}, "text.format", "invalid_value"),
    ({"text": {"fromat": {}}}, "text.fromat", "unknown_field"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_field"),
    ({"reasoning": {"summary": 5}}, "reasoning.summary", "unsupported_field"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_field"),
    ({"reasoning": {"summry": "auto"}}, "reasoning.summry", "unknown_field"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_field"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "invalid_value"),
    ({"tools": ["a"]}, "tools[0]", "invalid_value"),
    ({"tools": {}}, "tools", "invalid_value"),
    ({"tools": FLAT * 129}, "tools", "invalid_value"),
    ({"input": [SAID] * 4097}, "input", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_field"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{**FLAT[0], "defer_loading": True}]}, "tools[0].defer_loading", "unknown_field"),
    ({"tools": [{**FLAT[0], "parameters": 5}]}, "tools[0].parameters", "invalid_value"),
    ({"tools": FLAT, "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tools": FLAT, "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_field"),
    ({"tools": FLAT, "tool_choice": {"type": "function"}}, "tool_choice.name", "missing_field"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "invalid_value",
    ),
    ({"truncation": "auto"}, "truncation", "invalid_value"),
    ({"store": True}, "store", "unsupported_field"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_field"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_field"),
    ({"background": True}, "background", "unsupported_field"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_field"),
    ({"max_tool_calls": 3}, "max_tool_calls", "unsupported_field"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_bad_fields_are_named(
    http: httpx.Client, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    """A 400 with this API's path, even where the chat endpoint behind it refuses; the message names
    no field of chat."""
    reply = http.post(RESPONSES, json={**BODY, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    if param != "messages":
        assert "`messages" not in error["message"]
    for inner in ("response_format", ".function`", "max_completion_tokens"):
        assert inner not in error["message"]
