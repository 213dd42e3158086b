"""The settings that are compared: no speculation, and each proposer at some fixed K and under the
controller."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.lab.comparison.workload import OFF, Arm

KS = (1, 2, 4, 8)  # for a draft model
NGRAM_KS = (8,)  # n-gram proposals cost nothing and are often accepted to their end

Proposers = tuple[str, ...]  # `proposers` of a request, in order; (): as configured


def settings_of(config: SpeculationConfig, draft: str, *, ngram: bool) -> dict[Arm, Proposers]:
    """Return the proposers of each arm: no speculation; the configured draft model, called `draft`,
    alone and with n-gram lookup; and lookup alone if `ngram` or there is no draft. The other
    companions, such as grammar and prediction, propose in all of them."""
    free = tuple(companion for companion in config.companions if companion != "ngram")
    found: dict[Arm, Proposers] = {OFF: ()}
    if config.proposer.kind not in ("draft_model", "self"):
        return found | _family("ngram", NGRAM_KS, ())
    found |= _family(draft, KS, (*free, config.proposer.kind))
    found |= _family(f"ngram + {draft}", (), (*free, "ngram", config.proposer.kind))
    return found | _family("ngram", NGRAM_KS, (*free, "ngram")) if ngram else found


def _family(name: str, ks: Sequence[int], proposers: Proposers) -> dict[Arm, Proposers]:
    """Return arms with each fixed K, then one under the controller."""
    arms = [Arm("fixed", k, f"{name} K={k}") for k in ks] + [Arm("auto", 0, f"{name} auto")]
    return dict.fromkeys(arms, proposers)
