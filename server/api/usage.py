"""Usage and provenance: how many tokens a reply took, how they came about, and who guessed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.generation.annotations import Origin
from server.generation.usage import Usage


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
