"""Random worlds: text of changing predictability, load and machine, none of it known beforehand.

A world is four phases; acceptance, batch, machine, burstiness, the worth of confidences and the
error of the start-up profile are drawn from its number. Common random numbers: the text of request
j in phase p of world s is a function of (s, p, j), so all policies are scored on the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.lab.replay.costs import Roofline
from engine.lab.replay.streams import Live, Request

BEYOND = 24  # positions after the end of a request, where guesses are in vain
NOISE = 0.05  # of a timing: standard deviation of its logarithm

_SHORTEST, _LONGEST = 200, 600
_PHASES = 4


@dataclass(frozen=True, slots=True)
class Text:
    """Positions are easy or hard, guessed right with chance `easy` or `hard`; a position keeps the
    state of the one before it with chance `stick`. Confidences are the log-odds of that chance plus
    noise of deviation `blur`, as a margin."""

    hard: float = 0.25
    easy: float = 0.985
    stick: float = 0.35
    blur: float = 1.0


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """A load: so many requests at a time, until so many tokens are generated."""

    acceptance: tuple[float, ...]  # by request, in turn
    batch: int
    tokens: int
    spread: float = 0.05  # between requests
    max_rounds: int | None = None


@dataclass(slots=True)
class World:
    """A machine, what its start-up profile shows, and the phases."""

    seed: int
    machine: Roofline
    profiled: Roofline
    text: Text
    phases: list[PhaseSpec]
    _requests: dict[tuple[int, int], Request] = field(default_factory=dict, repr=False)

    def workload(self, phase: int) -> Endless:
        """Phase `phase`, from its first request."""
        return Endless(self.phases[phase], lambda j: self.request(phase, j))

    def request(self, phase: int, j: int) -> Request:
        """Request j of a phase; the same object each time."""
        if (phase, j) not in self._requests:
            rng = np.random.default_rng([self.seed, phase, j])
            spec = self.phases[phase]
            acceptance = spec.acceptance[j % len(spec.acceptance)]
            if len(spec.acceptance) == 1:
                acceptance = float(np.clip(acceptance + rng.normal(0, spec.spread), 0.12, 0.97))
            self._requests[phase, j] = _draw(self.text, acceptance, rng)
        return self._requests[phase, j]


@dataclass(slots=True)
class Endless:
    """A batch that is always full: whoever ends is followed by the next of the queue."""

    spec: PhaseSpec
    request: Callable[[int], Request]
    next: int = 0

    def admit(self, batch: list[Live], tokens: int) -> None:
        while len(batch) < self.spec.batch:
            batch.append(Live(self.request(self.next)))
            self.next += 1

    def over(self, tokens: int, rounds: int) -> bool:
        limit = self.spec.max_rounds
        return tokens >= self.spec.tokens if limit is None else rounds >= limit


def random_world(number: int) -> World:
    """World `number`: acceptance .2 to .95, 1 to 32 requests, a ridge of 15 to 300 rows, a draft
    step of 3 to 35 % of the weights' time, a profile wrong by -30 to +40 %."""
    rng = np.random.default_rng(777000 + number)
    weights = 5e-3
    ridge = float(np.exp(rng.uniform(np.log(15), np.log(300))))
    draft = weights * float(np.exp(rng.uniform(np.log(0.03), np.log(0.35))))
    hard, easy = float(rng.uniform(0.05, 0.45)), float(rng.uniform(0.92, 0.995))
    text = Text(hard, easy, float(rng.uniform(0, 0.7)), float(rng.choice([1.0, 2.5, 5.0])))
    phases = []
    for _ in range(_PHASES):
        batch = int(rng.choice([1, 2, 4, 8, 16, 32]))
        acceptance = float(rng.uniform(max(hard, 0.2), 0.95))
        spread = float(rng.choice([0.0, 0.05, 0.2]))
        phases.append(PhaseSpec((acceptance,), batch, max(1500, 500 * batch), spread))
    machine = Roofline(weights=weights, ridge=ridge, draft_step=draft)
    profiled = Roofline(
        weights=weights * float(rng.uniform(0.7, 1.4)),
        ridge=ridge * float(rng.uniform(0.6, 1.8)),
        draft_step=draft * float(rng.uniform(0.6, 1.4)),
    )
    return World(9000 + number, machine, profiled, text, phases)


def _draw(text: Text, acceptance: float, rng: np.random.Generator) -> Request:
    length = int(rng.integers(_SHORTEST, _LONGEST))
    count = length + BEYOND
    share = float(np.clip((acceptance - text.hard) / (text.easy - text.hard), 0.02, 0.98))
    fresh = rng.random(count) > share
    keep = rng.random(count) < text.stick
    places = np.arange(count)
    origin = np.maximum.accumulate(np.where(keep & (places > 0), 0, places))
    chance = np.where(fresh[origin], text.hard, text.easy)
    hits = rng.random(count) < chance
    odds = np.log(chance / (1 - chance)) + rng.normal(0, text.blur, count)
    context = int(rng.integers(500, 2500))
    return Request(hits.tolist(), _margin(odds).tolist(), length, context)


def _margin(odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-odds as what is positive and as large where it is large, like the margin of a draw."""
    return np.logaddexp(0.0, odds)
