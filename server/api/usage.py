"""Usage: how many tokens a reply took, and how they came about."""

from __future__ import annotations

from typing import Any

from server.generation import Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, and how speculation went: draft tokens proposed and accepted, and the number
    of sampling steps (rounds) that all completion tokens took."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "speculation": {
            "proposed": usage.proposed,
            "accepted": usage.accepted,
            "rounds": usage.rounds,
        },
    }
