"""Log-probabilities in the two shapes of the OpenAI API. Natural logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.choice import Alternative, TextLogprobs

FLOOR = -9999.0  # stands for minus infinity, which JSON does not have


def completion_logprobs(entries: Sequence[TextLogprobs] | None) -> dict[str, Any] | None:
    """tokens, token_logprobs, top_logprobs, text_offset; nulls for the first token of an echoed
    prompt. `top_logprobs` holds the chosen token too, so it may have one entry more than asked."""
    if entries is None:
        return None
    return {
        "tokens": [entry.chosen.token for entry in entries],
        "token_logprobs": [_value(entry.chosen) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[TextLogprobs] | None) -> dict[str, Any] | None:
    """content: one entry per token, with its bytes and alternatives."""
    if entries is None:
        return None
    content = [
        {**_chat(entry.chosen), "top_logprobs": [_chat(other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _value(alternative: Alternative) -> float | None:
    return None if alternative.logprob is None else max(alternative.logprob, FLOOR)


def _top(entry: TextLogprobs) -> dict[str, float] | None:
    """Two tokens may share a text; the likelier one keeps it."""
    if entry.chosen.logprob is None:
        return None
    top: dict[str, float] = {}
    for other in [*entry.top, entry.chosen]:
        if other.logprob is not None:
            top.setdefault(other.token, max(other.logprob, FLOOR))
    return top


def _chat(alternative: Alternative) -> dict[str, Any]:
    return {
        "token": alternative.token,
        "logprob": _value(alternative),
        "bytes": list(alternative.bytes),
    }
