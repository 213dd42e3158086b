"""The ways to serve that are compared: no speculation, and each proposer under some fixed K and
under the controller."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.lab.comparison.workload import OFF, Arm

KS = (1, 2, 4, 8)  # of a draft
NGRAM_KS = (8,)  # a look-up costs nothing to make, and is often right to its end

Proposers = tuple[str, ...]  # in the order in which a request has them asked, () as configured


def settings_of(said: SpeculationConfig, draft: str, *, ngram: bool) -> dict[Arm, Proposers]:
    """By arm: none, the configured draft model, called `draft`, alone and with n-gram lookup, and
    if `ngram` or there is no draft, lookup alone. A request's grammar and prediction propose in
    all of them."""
    free = tuple(companion for companion in said.companions if companion != "ngram")
    found: dict[Arm, Proposers] = {OFF: ()}
    if said.proposer.kind not in ("draft_model", "self"):
        return found | _family("ngram", NGRAM_KS, ())
    found |= _family(draft, KS, (*free, said.proposer.kind))
    found |= _family(f"ngram + {draft}", (), (*free, "ngram", said.proposer.kind))
    return found | _family("ngram", NGRAM_KS, (*free, "ngram")) if ngram else found


def _family(name: str, ks: Sequence[int], proposers: Proposers) -> dict[Arm, Proposers]:
    """Fixed Ks, then the controller."""
    arms = [Arm("fixed", k, f"{name} K={k}") for k in ks] + [Arm("auto", 0, f"{name} auto")]
    return dict.fromkeys(arms, proposers)
