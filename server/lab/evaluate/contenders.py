"""The ways to serve that are compared: no speculation, and each proposer under some fixed K and
under the controller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.config import (
    AdaptiveConfig,
    Companion,
    EngineConfig,
    FixedConfig,
    NgramConfig,
    NoProposerConfig,
    SpeculationConfig,
)
from engine.lab.evaluate_messages import Mode
from engine.messages import Ready
from server.lab.evaluate.tasks import Task

PLAIN = "K=0"
DRAFT, NGRAM, BOTH, ALONE = "draft", "ngram", "ngram + draft", "draft alone"
KS = (1, 2, 4, 8)
NGRAM_KS = (8,)  # a look-up costs nothing to make, and is often right to its end
COMPANIONS = ("grammar", "prediction")


@dataclass(frozen=True, slots=True)
class Contender:
    """`family`: who proposes, "" for nobody; contenders of one family differ in K alone. `deep`:
    the largest K of its family, from which acceptance by position is read."""

    name: str
    family: str
    mode: Mode
    deep: bool = False


def contenders(ready: Ready, tasks: Iterable[Task]) -> list[Contender]:
    """K = 0 first. `draft` and `ngram` propose together with the free companions of a request (its
    grammar, its prediction); `draft alone`, without them, takes part if some request has any."""
    plain, main = Contender(PLAIN, "", Mode("off")), ready.proposer
    if main != "draft_model":
        return [plain, *_family(NGRAM, None, NGRAM_KS, ready.k_max)]
    free = tuple(name for name in COMPANIONS if name in ready.proposers)
    found = [
        plain,
        *_family(DRAFT, (*free, main), KS, ready.k_max),
        *_family(NGRAM, (*free, "ngram"), NGRAM_KS, ready.k_max),
        *_family(BOTH, (*free, "ngram", main), (), 0),
    ]
    if any(task.submit.params.grammar or task.submit.params.prediction for task in tasks):
        found += _family(ALONE, (main,), (), 0)
    return found


def _family(
    name: str, proposers: tuple[str, ...] | None, ks: tuple[int, ...], k_max: int
) -> list[Contender]:
    """The fixed K up to the largest there is, and the controller."""
    within = sorted({min(k, k_max) for k in ks})
    fixed = [
        Contender(f"{name} K={k}", name, Mode("fixed", k, proposers), deep=k == within[-1])
        for k in within
    ]
    return [*fixed, Contender(f"{name} auto", name, Mode("auto", 0, proposers))]


def recommended(config: EngineConfig, contender: Contender) -> SpeculationConfig:
    """The settings under which a server does what the contender did."""
    said = config.speculation
    if contender.name == PLAIN:
        return said.model_copy(update={"proposer": NoProposerConfig()})
    proposer, companions = said.proposer, said.companions
    if contender.family == NGRAM:
        proposer = proposer if isinstance(proposer, NgramConfig) else NgramConfig()
    else:
        ngram: tuple[Companion, ...] = ("ngram",)
        free = tuple(name for name in companions if name != "ngram")
        companions = {DRAFT: free, BOTH: free + ngram, ALONE: ()}[contender.family]
    adaptive = said.controller if isinstance(said.controller, AdaptiveConfig) else AdaptiveConfig()
    fixed = contender.mode.name == "fixed"
    controller = FixedConfig(k=contender.mode.k) if fixed else adaptive
    return said.model_copy(
        update={"proposer": proposer, "companions": companions, "controller": controller}
    )
