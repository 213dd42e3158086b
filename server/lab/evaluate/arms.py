"""The ways to serve that are compared: no speculation, and each proposer under some fixed K and
under the controller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.config import (
    AdaptiveConfig,
    FixedConfig,
    NgramConfig,
    NoProposerConfig,
    SpeculationConfig,
)
from engine.messages import Mode

PLAIN = "K=0"
KS = (1, 2, 4, 8)  # of a draft
NGRAM_KS = (8,)  # a look-up costs nothing to make, and is often right to its end


@dataclass(frozen=True, slots=True)
class Arm:
    """`proposers` in the order in which they are asked, () as configured. `config`: the settings
    under which a server does the same."""

    name: str
    mode: Mode
    config: SpeculationConfig
    k: int = 0
    proposers: tuple[str, ...] = ()


def plain_arm(said: SpeculationConfig) -> Arm:
    return Arm(PLAIN, "off", said.model_copy(update={"proposer": NoProposerConfig()}))


def arms_of(said: SpeculationConfig, name: str, *, with_ngram: bool) -> Iterator[Arm]:
    """Of the configured proposer: a draft, called `name`, or n-gram lookup. `with_ngram`: lookup
    alone, too. A request's grammar and prediction propose in all of them."""
    free = tuple(companion for companion in said.companions if companion != "ngram")
    draft = said.proposer if said.proposer.kind == "draft_model" else None
    lookup = said.proposer if said.proposer.kind == "ngram" else NgramConfig()
    if draft is not None:
        alone = said.model_copy(update={"companions": free})
        yield from _family(alone, name, KS, (*free, "draft_model"))
        both = said.model_copy(update={"companions": (*free, "ngram")})
        yield from _family(both, f"ngram + {name}", (), (*free, "ngram", "draft_model"))
    if with_ngram:
        ngram = said.model_copy(update={"proposer": lookup, "companions": free})
        yield from _family(ngram, "ngram", NGRAM_KS, (*free, "ngram") if draft else ())


def _family(
    said: SpeculationConfig, name: str, ks: Sequence[int], proposers: tuple[str, ...]
) -> Iterator[Arm]:
    """Fixed Ks, then the controller."""
    for k in ks:
        fixed = said.model_copy(update={"controller": FixedConfig(k=k)})
        yield Arm(f"{name} K={k}", "fixed", fixed, k, proposers)
    is_adaptive = isinstance(said.controller, AdaptiveConfig)
    update = {} if is_adaptive else {"controller": AdaptiveConfig()}
    yield Arm(f"{name} auto", "auto", said.model_copy(update=update), 0, proposers)
