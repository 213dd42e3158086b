"""How policies compare: what each took, by phase of the load, beside every fixed K."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from engine.config import AdaptiveConfig, FixedConfig, SpeculationConfig
from engine.control.controller import KController
from engine.control.modes import build_controller
from engine.errors import ConfigError
from engine.scheduling.step_record import StepRecord

ALLOWED = "adaptive, fixed:K (0 to 16), or module:callable, which is called with k_max"
ORACLE = "oracle: best K by phase"


@dataclass(slots=True)
class Score:
    """One policy. Lists are by phase; `drafted` counts draft forwards, `switches` changes of the K
    played from one round of a phase to the next."""

    name: str
    seconds: list[float]
    rounds: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    switches: int = 0

    @classmethod
    def of(cls, name: str, phases: int, steps: Iterable[tuple[int, StepRecord]]) -> Score:
        """From the steps, each with its phase."""
        score, last = cls(name, [0.0] * phases, [0] * phases, [0] * phases), (-1, 0)
        for phase, step in steps:
            score.seconds[phase] += step.seconds
            score.rounds[phase] += 1
            score.drafted[phase] += max([part.drafted for part in step.parts], default=0)
            score.proposed += sum([part.proposed for part in step.parts])
            score.accepted += sum([part.accepted for part in step.parts])
            score.switches += last[0] == phase and last[1] != step.k
            last = phase, step.k
        return score

    @property
    def total(self) -> float:
        return sum(self.seconds)


def best_of(fixed: Sequence[Score]) -> Score:
    """The best K for all of it, in hindsight."""
    return min(fixed, key=lambda score: score.total)


def oracle_of(fixed: Sequence[Score]) -> Score:
    """The best K of each phase, known beforehand."""
    best = [min(fixed, key=lambda score: score.seconds[i]) for i in range(len(fixed[0].seconds))]
    return Score(
        ORACLE,
        [score.seconds[i] for i, score in enumerate(best)],
        [score.rounds[i] for i, score in enumerate(best)],
        [score.drafted[i] for i, score in enumerate(best)],
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def build_policy(name: str, k_max: int, *, stops: bool = True) -> KController:
    """What `--policy` names: a fresh controller; `stops`: it will be asked between draft steps.
    Raises ConfigError for a name that is none."""
    kind, _, rest = name.partition(":")
    if name == "adaptive":
        config = AdaptiveConfig(k_max=k_max)
        return build_controller(SpeculationConfig(controller=config), stops=stops)
    if kind == "fixed" and rest.isdecimal() and int(rest) <= 16:
        return build_controller(SpeculationConfig(controller=FixedConfig(k=int(rest))))
    try:
        build: Callable[[int], KController] = getattr(import_module(kind), rest)
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(f"policy {name!r} is unknown; allowed: {ALLOWED}") from None
    try:
        made = build(k_max)
    except Exception as error:  # a user's own code may do anything
        raise ConfigError(f"policy {name!r} cannot be built for K {k_max}: {error}") from error
    if not hasattr(made, "choose"):
        raise ConfigError(f"policy {name!r} builds no controller; allowed: {ALLOWED}")
    return made
