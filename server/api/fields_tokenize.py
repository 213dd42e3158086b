"""Rows of /tokenize and /detokenize (vLLM's names), where they differ from the chat API's."""

from __future__ import annotations

from server.api.field_row import FieldRow

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
        "add_generation_prompt",
        None,
        None,
        "true or false, and only with `messages`",
        "Default true: the begin of the assistant's turn is counted too.",
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
    FieldRow(
        "chat_template",
        None,
        None,
        "left out",
        "Templates are programs; only the model's own is run.",
        tokenize="refused",
    ),
)
