"""The 200 requests: 40 combinations of fields, each at five temperatures with its own seed."""

from __future__ import annotations

from typing import Any

Request = tuple[str, dict[str, Any]]  # route and body, without `model`

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPERATURES = (0, 0.3, 0.7, 1, 1.3)
CODE = "import os\n\ndef read_file(path):\n"
PROMPTS = (CODE, "def add(", "x = 1\ny = 2\n", "def fibonacci(n):\n", "class Stack:\n")
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Extract the facts as JSON: Alice Smith is 34 years old and lives in Paris.",
    "What is the weather in Rome?",
    "Hi",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"name": "journey", "schema": SCHEMA}
LARK = 'start: "<" /[a-z]{1,6}/ (", " /[0-9]{2}/)* ">"'
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of Italy?"},
    {"role": "assistant", "content": "Rome."},
    {"role": "user", "content": "And of France?"},
]
BEGUN = [*TURNS, {"role": "assistant", "content": "The capital of"}]
EDIT = {"type": "content", "content": "def add(a, b):\n    return a + b\n"}  # a prediction
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
STRICT = {"name": "forecast", "parameters": SCHEMA, "strict": True}
LOOSE = {"name": "get_weather", "description": "Get the weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": function} for function in (LOOSE, STRICT)]
NAMED = {"type": "function", "function": {"name": "get_weather"}}

FIELDS: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"provenance": True},
        {**USAGE, "provenance": True},
        {"n": 3},
        {**USAGE, "n": 2, "logprobs": 1},
        {"prompt": [CODE, "x = 1\n"], "n": 2, "best_of": 4, "logprobs": 0},
        {"top_p": 0.8, "max_tokens": 48},
        {"top_k": 5, "max_tokens": 48},
        {"min_p": 0.1, "top_p": 0.95, "top_k": 50},
        {"presence_penalty": 1, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"logit_bias": {"5": 4, "206": -3, "304": 2}},
        {**USAGE, "stop": ["return", "\n\n"], "n": 2},
        {"stop_token_ids": [206, 304], "min_tokens": 6, "include_stop_str_in_output": True},
        {"echo": True, "logprobs": 2, "max_tokens": 8},
        {"prompt_logprobs": 2, "max_tokens": 12},
        {"prompt": CODE, "suffix": "\n    return text\n"},
        {"prediction": EDIT, "prompt": "def add(", "max_tokens": 40},
        {"prompt": [[311, 965, 15], [72, 19, 317, 304]], **USAGE},
        {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 64},
        {"structured_outputs": {"grammar": LARK}, "logprobs": 1},
        {"speculation": {"max_draft": 2, "proposers": ["ngram", "draft_model"]}, "max_tokens": 64},
    ],
    CHAT: [
        {},
        {**USAGE, "logprobs": True, "top_logprobs": 2, "max_tokens": 12},
        {"response_format": {"type": "json_schema", "json_schema": FORMAT}, "max_tokens": 60},
        {"response_format": {"type": "json_object"}, **USAGE},
        {"structured_outputs": {"regex": "[a-z]{3,8}( [a-z]{3,8}){0,3}[.]"}, "n": 2},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, **USAGE},
        {"tools": TOOLS, "max_tokens": 60},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60, **USAGE},
        {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "max_tokens": 60},
        {"tools": TOOLS[1:], "n": 2, "max_tokens": 60, **USAGE},
        {"messages": BEGUN, "continue_final_message": True},
        {"prediction": EDIT, "speculation": {"proposers": ["prediction"]}},
        {"messages": TURNS, "stop": ".", "priority": -1, "cache_salt": "a", "provenance": True},
        {"speculation": {"enabled": False}, "prompt_logprobs": 1, "logprobs": True},
    ],
    RESPONSES: [
        {"instructions": "Be brief.", "provenance": True},
        {"stream": True, "top_p": 0.9, "max_output_tokens": 48},
        {"text": {"format": {"type": "json_schema", **FORMAT}}},
        {"tools": [{"type": "function", **STRICT}], "tool_choice": "required", "stream": True},
        {"include": ["message.output_text.logprobs"], "speculation": {"max_draft": 1}},
    ],
}


def requests() -> list[Request]:
    """Return all requests, in the order in which they are recorded."""
    every = [(route, fields) for route in FIELDS for fields in FIELDS[route] for _ in TEMPERATURES]
    return [(route, _body(route, fields, i)) for i, (route, fields) in enumerate(every)]


def _body(route: str, fields: dict[str, Any], number: int) -> dict[str, Any]:
    turn = (number + number // 5) % 5  # so that a temperature does not always meet the same prompt
    own: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": PROMPTS[turn], "max_tokens": 24},
        CHAT: {"messages": [{"role": "user", "content": QUESTIONS[turn]}], "max_tokens": 24},
        RESPONSES: {"input": QUESTIONS[turn], "max_output_tokens": 24},
    }
    common = {"seed": number, "temperature": TEMPERATURES[number % 5], "return_token_ids": True}
    return {**own[route], **common, **fields}
