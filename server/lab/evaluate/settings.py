"""The settings that are compared: no speculation, and each proposer at some fixed K and under the
controller."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.lab.comparison.workload import OFF, Arm

LOOKUPS = ("ngram", "suffix")
KS = (1, 2, 4, 8)
FREE_KS = (8,)  # free proposals cost nothing and are often accepted to their end

Settings = dict[Arm, tuple[str, ...]]  # each arm's `proposers` of a request; (): as configured


def settings_of(config: SpeculationConfig, main: str, *, free: bool, predicted: bool) -> Settings:
    """Return the proposers of each arm: no speculation; the main proposer, called `main`, alone and
    after each look-up (n-gram, and `suffix` if configured); if `free`, look-ups without it, and,
    if `predicted`, predictions. Other companions, such as grammar, propose in all arms."""
    kind = "ngram" if config.proposer.kind == "none" else config.proposer.kind
    given = tuple(name for name in config.companions if name not in LOOKUPS)
    suffix = config.remembered_tokens > 0 or "suffix" in config.companions
    lookups = [name for name in LOOKUPS if name != kind and (suffix or name == "ngram")]
    found: Settings = {OFF: ()}
    found |= _family(main, FREE_KS if kind in LOOKUPS else KS, (*given, kind))
    for name in lookups if kind not in LOOKUPS else ():
        found |= _family(f"{name} + {main}", (), (*given, name, kind))
    for name in [*lookups, *["prediction"] * predicted] if free else ():
        found |= _family(name, FREE_KS, tuple(dict.fromkeys((*given, name))))
    return found


def _family(name: str, ks: Sequence[int], proposers: tuple[str, ...]) -> Settings:
    """Return arms with each fixed K, then one under the controller."""
    arms = [Arm("fixed", k, f"{name} K={k}") for k in ks] + [Arm("auto", 0, f"{name} auto")]
    return dict.fromkeys(arms, proposers)
