"""Random worlds: texts of varying predictability, loads and machines, unknown to the controller.

Request j in phase p of world s depends only on (s, p, j), so all policies are scored on the same
text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np

from engine.control.profile import BATCHES, CONTEXT, ROWS_OF_ONE, Profile, row_counts, times_four
from engine.lab.replay.play import UNLIMITED, Player, Request, Score, Workload

# CUDA graphs exist for these numbers of rows; a step is padded to the next one.
BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
)  # fmt: skip
_ROWS = {n: row_counts(rows, 16) for n, rows in ((1, ROWS_OF_ONE), *BATCHES)}
BEYOND = 24  # positions after the end of a request, where draft tokens are wasted

_SHORTEST, _LONGEST = 200, 600
_PHASES = 4


@dataclass(slots=True)
class Roofline:
    """Exact costs, in seconds, of a device that reads its weights in `weights` seconds and at
    `ridge` rows computes for as long; launches and reading the KV cache are added."""

    weights: float = 5e-3
    ridge: float = 42.0
    launch: float = 0.8e-3
    kv_token: float = 4e-8
    draft_step: float = 0.7e-3
    draft_row: float = 4e-6
    begin: float = 0.0
    _forward: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row = self.weights / self.ridge
        self._forward = [
            self.launch + (self.weights**4 + (row * BUCKETS[bisect_left(BUCKETS, n)]) ** 4) ** 0.25
            for n in range(BUCKETS[-1] + 1)
        ]

    def target(self, rows: int, sequences: int, context: int, *, prompts: bool = False) -> float:
        return self._forward[rows] + self.kv_token * context

    def draft(self, rows: int) -> float:
        return self.draft_step + self.draft_row * rows

    def host(self, rows: int, sequences: int, *, prompts: bool = False) -> float:
        return 0.0

    def profile(self) -> Profile:
        """Return this machine's start-up profile, in the form of engine.step.profiling."""
        alone = [(rows, self.target(rows, 1, CONTEXT)) for rows in _ROWS[1]]
        return Profile(
            target=alone + [(n, self.target(n, n, n * CONTEXT)) for n in times_four(16, 64)],
            draft=[(n, self.draft(n)) for n in times_four(1, 64)],
            batches={
                n: [(n * rows, self.target(n * rows, n, n * CONTEXT)) for rows in each]
                for n, each in _ROWS.items()
            },
            padded=BUCKETS,
            token_seconds={1: (self.kv_token, 0.0)},
        )


@dataclass(frozen=True, slots=True)
class Text:
    """Positions are easy or hard: a draft token is right with probability `easy` or `hard`. A
    position keeps the previous one's state with probability `stick`. Confidences are the log-odds
    of that probability plus noise with standard deviation `blur`, mapped to a positive margin."""

    hard: float = 0.25
    easy: float = 0.985
    stick: float = 0.35
    blur: float = 1.0


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """A load: `batch` requests at a time until `tokens` tokens are generated."""

    acceptance: float
    batch: int
    tokens: int
    spread: float = 0.05  # standard deviation of acceptance between requests


@dataclass(slots=True)
class World:
    """A scores.Scene: a machine, its (inexact) start-up profile, and the phases."""

    number: int
    costs: Roofline
    profile: Profile
    text: Text
    phases: list[PhaseSpec]
    budget: int = UNLIMITED
    stops: bool = True

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases)

    def workload(self, phase: int) -> Workload:
        """Return the workload of a phase, from its first request; the supply is endless."""
        spec = self.phases[phase]
        requests = (self.request(phase, j) for j in count())
        return Workload(requests, spec.tokens, spec.batch)

    def request(self, phase: int, j: int) -> Request:
        """Return request j of a phase; the same object each time, while it is cached."""
        return _request(self.number, self.text, self.phases[phase], phase, j)

    def score(self, name: str, player: Player) -> Score:
        """Play all phases. Each phase's time is scaled to exactly its number of tokens, since the
        last round may exceed it."""
        steps = [
            [(phase, step) for step in player.play(self.workload(phase))]
            for phase in range(len(self.phases))
        ]
        score = Score.of(name, len(steps), [step for phase in steps for step in phase])
        for phase, spec in enumerate(self.phases):
            score.seconds[phase] *= spec.tokens / sum(step.tokens for _, step in steps[phase])
        return score


def random_world(number: int) -> World:
    """Return world `number`: acceptance 0.2 to 0.95, 1 to 32 requests, a ridge of 15 to 300 rows, a
    draft step of 3 to 35 % of the weights' time; a profile of that time wrong by -30 to +40 %."""
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
        phases.append(PhaseSpec(acceptance, batch, max(1500, 500 * batch), spread))
    machine = Roofline(weights=weights, ridge=ridge, draft_step=draft)
    profiled = Roofline(
        weights=weights * float(rng.uniform(0.7, 1.4)),
        ridge=ridge * float(rng.uniform(0.6, 1.8)),
        draft_step=draft * float(rng.uniform(0.6, 1.4)),
    )
    return World(number, machine, profiled.profile(), text, phases)


@lru_cache(1 << 14)  # requests; drawn once per world, for all policies
def _request(number: int, text: Text, spec: PhaseSpec, phase: int, j: int) -> Request:
    rng = np.random.default_rng([9000 + number, phase, j])
    acceptance = float(np.clip(spec.acceptance + rng.normal(0, spec.spread), 0.12, 0.97))
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
    # softplus: positive like the margin of a draw, and as large as the log-odds if they are large.
    margins = np.logaddexp(0.0, odds)
    return Request(hits.tolist(), margins.tolist(), length, context)
