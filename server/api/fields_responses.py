"""Rows of /v1/responses. It runs on the chat endpoint, so most rows follow chat's: one that means
the same is shared as it is, one of another shape (`_like`) has chat's status and conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from server.api.field_row import FieldRow
from server.api.limits import MAX_MESSAGES, MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

REASONING_REFUSED = ("summary", "generate_summary", "context", "mode")
NO_REASONING = "must be left out or null, since reasoning is not told apart from text"

# Handed to the chat endpoint as they are, whatever it does with them.
SHARED = frozenset({
    "model", "stream", "temperature", "top_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "cache_salt", "priority", "structured_outputs", "chat_template_kwargs", "prediction",
    "speculation", "provenance", "return_token_ids", "parallel_tool_calls", "user", "metadata",
    "service_tier", "safety_identifier", "prompt_cache_key", "moderation", "prompt_cache_options",
    "prompt_cache_retention",
})  # fmt: skip


def with_responses(chat: Sequence[FieldRow]) -> tuple[FieldRow, ...]:
    """The rows of the other endpoints, shared ones told of this one, and its own after them."""
    rows = [replace(r, responses=r.chat) if r.chat and r.name in SHARED else r for r in chat]
    by_name = {row.name: row for row in chat if row.chat is not None}
    return (*rows, *_own(by_name), *REFUSED)


def _like(row: FieldRow, name: str, allowed: str, meaning: str, *neutral: object) -> FieldRow:
    neutral = neutral or row.neutral
    return FieldRow(
        name, None, None, allowed, meaning, neutral, responses=row.chat, unless=row.unless
    )


def _supported(name: str, allowed: str, meaning: str) -> FieldRow:
    return FieldRow(name, None, None, allowed, meaning, responses="supported")


def _refused(name: str, allowed: str, meaning: str, *neutral: object) -> FieldRow:
    return FieldRow(name, None, None, allowed, meaning, neutral, responses="refused")


def _own(chat: dict[str, FieldRow]) -> tuple[FieldRow, ...]:
    return (
        _like(
            chat["messages"],
            "input",
            f"a string or a list of 1 to {MAX_MESSAGES} items",
            "Items: messages (roles user, system, developer, assistant; content a string or a list"
            " of input_text and output_text parts), function_call and function_call_output. Ids"
            " and statuses of items are not stored.",
        ),
        _supported("instructions", "a string", "A system message before the input."),
        _like(
            chat["max_completion_tokens"],
            "max_output_tokens",
            "an integer of at least 1",
            "Until the context is full by default. Input plus output must fit the context.",
        ),
        _supported(
            "include",
            f'a list of "{LOGPROBS}" and "{ENCRYPTED}"',
            "Log-probabilities of the text. Reasoning items are never made, so nothing is"
            " encrypted in them.",
        ),
        _like(
            chat["top_logprobs"],
            "top_logprobs",
            f'an integer from 0 to 20, and only with `include`: ["{LOGPROBS}"]',
            "Alternatives per token.",
        ),
        _supported(
            "text",
            'an object with "format" (an object of the type text, json_object or json_schema) and'
            ' "verbosity"',
            "`format` does what `response_format` does for chat, `verbosity` what it does there.",
        ),
        _like(
            chat["reasoning_effort"],
            "reasoning",
            'an object with "effort"',
            "`effort` does what `reasoning_effort` does for chat. Each of"
            f" {', '.join(f'`{name}`' for name in REASONING_REFUSED)} {NO_REASONING}.",
            {},
        ),
        _like(
            chat["tools"],
            "tools",
            f'a list of at most {MAX_TOOLS} objects with the type "function", name, description,'
            " parameters and strict",
            "As for chat. There are no hosted tools.",
        ),
        _like(
            chat["tool_choice"],
            "tool_choice",
            '"none", "auto", "required", {"type": "function", "name": ...} or {"type":'
            ' "allowed_tools", "mode": ..., "tools": [...]}',
            "As for chat.",
        ),
        _supported(
            "stream_options",
            'an object with the field "include_obfuscation" (false), and only with `stream`',
            "Nothing is padded.",
        ),
        _supported("truncation", '"disabled"', "Input that does not fit is a 400, never cut."),
    )


NOT_STORED = "No response is stored: send the whole conversation as `input`."
HOSTED = "There are no hosted tools."

REFUSED = (
    _refused("store", "left out or false", "Nothing is ever stored.", False),
    _refused("previous_response_id", "left out", NOT_STORED),
    _refused("conversation", "left out", NOT_STORED),
    _refused("background", "left out or false", "Responses are made while you wait.", False),
    _refused("prompt", "left out", "There are no stored prompt templates."),
    _refused("max_tool_calls", "left out", HOSTED),
    _refused("context_management", "left out or []", "Nothing is compacted.", []),
    _refused("access_programs", "left out", "There are none."),
    _refused("image", "left out", "Text only."),
)
