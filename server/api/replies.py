"""Parts of replies: usage, provenance, and log-probabilities (natural logarithms) in the two shapes
of the OpenAI API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.messages import TokenLogprobs
from server.generation.logprobs import Alternative, TextLogprobs, token_text
from server.generation.provenance import Origin
from server.generation.usage import Usage
from server.text.tokenizer import Tokenizer


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, and how speculation went: draft tokens proposed and accepted, and the number
    of sampling steps (rounds) that all completion tokens took; who was allowed to guess how much;
    those who did guess, with their parts of proposed and accepted.
    Steps after the one that completed a stop string are not counted.

    Accepted prediction tokens are completion tokens that were guessed from the prediction; rejected
    ones were guessed from it and are not in the completion, nor in `completion_tokens`."""
    guessing = usage.guessing
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.predicted,
            "rejected_prediction_tokens": usage.mispredicted,
        },
        "speculation": {
            "enabled": guessing.enabled,
            "max_draft": guessing.max_draft,
            "proposers": list(guessing.proposers),
            "proposed": usage.proposed,
            "accepted": usage.accepted,
            "rounds": usage.rounds,
            "by_proposer": {
                name: {"proposed": proposed, "accepted": accepted}
                for name, (proposed, accepted) in usage.by_proposer.items()
            },
        },
    }


def provenance_body(origins: Sequence[Origin] | None) -> dict[str, Any]:
    """A choice's `provenance`, when it was asked for: {text, source} for each token."""
    if origins is None:
        return {}
    return {"provenance": [{"text": o.text, "source": o.source} for o in origins]}


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
