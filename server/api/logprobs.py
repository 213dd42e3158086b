"""Log-probabilities in the two shapes of the OpenAI API. Natural logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.messages import TokenLogprobs
from server.generation.annotations import Alternative, TextLogprobs, token_text
from server.text.tokenizer import Tokenizer

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


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], tokens: Sequence[int], count: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's shape: per prompt token an object from token id to log-probability, rank among all
    tokens and text, of the token itself and of the `count` likeliest; null for the first one."""
    rows: list[dict[str, Any] | None] = []
    for token, entry in zip(tokens, entries, strict=True):
        if entry is None:
            rows.append(None)
            continue
        ranked = [(token, entry.logprob, entry.rank)]
        ranked += [(i, logprob, n) for n, (i, logprob) in enumerate(entry.top[:count], 1)]
        rows.append(
            {
                str(i): {
                    "logprob": max(logprob, FLOOR),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer.token_bytes(i)),
                }
                for i, logprob, rank in ranked
            }
        )
    return rows


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
