"""The ways to serve that are compared, and the settings of a server that does the same: no
speculation, and each proposer under some fixed K and under the controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.config import (
    AdaptiveConfig,
    FixedConfig,
    NgramConfig,
    NoProposerConfig,
    SpeculationConfig,
)
from engine.lab.comparison.workload import OFF, Arm

KS = (1, 2, 4, 8)  # of a draft
NGRAM_KS = (8,)  # a look-up costs nothing to make, and is often right to its end


class Setting(NamedTuple):
    """Of one arm. `proposers` in the order in which a request has them asked, () as configured."""

    config: SpeculationConfig
    proposers: tuple[str, ...] = ()


def settings_of(said: SpeculationConfig, draft: str, *, ngram: bool) -> dict[Arm, Setting]:
    """By arm: none, the configured draft model, called `draft`, alone and with n-gram lookup, and
    if `ngram` or there is no draft, lookup alone. A request's grammar and prediction propose in
    all of them."""
    free = tuple(companion for companion in said.companions if companion != "ngram")
    alone = said.model_copy(update={"companions": free})
    found = {OFF: Setting(said.model_copy(update={"proposer": NoProposerConfig()}))}
    if said.proposer.kind == "draft_model":
        both = said.model_copy(update={"companions": (*free, "ngram")})
        found |= _family(alone, draft, KS, (*free, "draft_model"))
        found |= _family(both, f"ngram + {draft}", (), (*free, "ngram", "draft_model"))
        if ngram:
            lookup = alone.model_copy(update={"proposer": NgramConfig()})
            found |= _family(lookup, "ngram", NGRAM_KS, (*free, "ngram"))
    else:
        own = said.proposer if said.proposer.kind == "ngram" else NgramConfig()
        found |= _family(alone.model_copy(update={"proposer": own}), "ngram", NGRAM_KS, ())
    return found


def _family(
    said: SpeculationConfig, name: str, ks: Sequence[int], proposers: tuple[str, ...]
) -> dict[Arm, Setting]:
    """Fixed Ks, then the controller."""
    fixed = {
        Arm("fixed", k, f"{name} K={k}"): said.model_copy(update={"controller": FixedConfig(k=k)})
        for k in ks
    }
    is_adaptive = isinstance(said.controller, AdaptiveConfig)
    update = {} if is_adaptive else {"controller": AdaptiveConfig()}
    arms = fixed | {Arm("auto", 0, f"{name} auto"): said.model_copy(update=update)}
    return {arm: Setting(config, proposers) for arm, config in arms.items()}
