"""Rows of /tokenize and /detokenize (vLLM's names). Messages become the prompt that chat would run,
so their fields are chat's own; the rows here are those that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from server.api.field_row import FieldRow

SHARED = frozenset({
    "messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort", "chat_template",
})  # fmt: skip


def with_tokenize(rows: Sequence[FieldRow]) -> tuple[FieldRow, ...]:
    """These rows, shared ones told of /tokenize, and its own after them."""
    shared = (replace(r, tokenize=r.chat) if r.chat and r.name in SHARED else r for r in rows)
    return (*shared, *TOKENIZE_ROWS)


TOKENIZE_ROWS: tuple[FieldRow, ...] = (
    FieldRow(
        "model",
        None,
        None,
        "the name of the served model (see /v1/models)",
        "May be left out; another name is a 404.",
        tokenize="supported",
        detokenize="supported",
    ),
    FieldRow(
        "prompt",
        None,
        None,
        "a string, and only without `messages`",
        "The text to tokenise.",
        tokenize="supported",
    ),
    FieldRow(
        "add_special_tokens",
        None,
        None,
        "true or false",
        "Default true for a prompt, as /v1/completions does; false for messages, whose template"
        " writes them.",
        tokenize="supported",
    ),
    FieldRow(
        "return_token_strs",
        None,
        None,
        "true or false",
        "Each token's own text too, as logprobs show it.",
        tokenize="supported",
    ),
    FieldRow(
        "tokens",
        None,
        None,
        "a list of token ids below the vocabulary size, at most as many as the context holds",
        "Special tokens are written out.",
        detokenize="supported",
    ),
)
