"""Score policies on scenes (a recorded trace, a random world) by time, beside every fixed K."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from engine.arguments import number
from engine.control.controller import FixedK
from engine.lab.comparison.report import table
from engine.lab.replay.play import Player, Score
from engine.lab.replay.recorded import Recorded
from engine.lab.replay.variants import VARIANTS
from engine.lab.replay.worlds import World

NOISE = 0.05  # of the timings that a controller sees, if not given: see --noise
ORACLE = "oracle: best K by phase"
_SLOWER = 1.02  # a policy's time over that of K = 0 above which it counts as slower

Scene = Recorded | World  # what policies are played on; all see the same bits


@dataclass(slots=True)
class Played:
    """The scores of all policies on one scene. `own`: by policy, each round's batch and the
    controller's own seconds."""

    name: str
    tokens: int
    fixed: list[Score]  # by K, from 0
    policies: list[Score]
    own: list[list[tuple[int, float]]]

    @property
    def best(self) -> Score:
        """The best single K in hindsight."""
        return min(self.fixed, key=lambda score: score.total)

    @property
    def oracle(self) -> Score:
        """The best K of each phase in hindsight."""
        phases = range(len(self.fixed[0].seconds))
        best = [min(self.fixed, key=lambda score: score.seconds[i]) for i in phases]
        return Score(
            ORACLE,
            [score.seconds[i] for i, score in enumerate(best)],
            [score.rounds[i] for i, score in enumerate(best)],
            [score.drafted[i] for i, score in enumerate(best)],
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        found = asdict(self)
        del found["own"]
        return {**found, "oracle": asdict(self.oracle)}


def add_options(parser: argparse.ArgumentParser, *, charge: float) -> None:
    """Add the options shared by all programs that play policies."""
    add = parser.add_argument
    add("--policy", action="append", choices=VARIANTS, metavar="NAME",
        help=f"one of: {', '.join(VARIANTS)}; may be repeated")  # fmt: skip
    add("--charge", type=number(0, 1000), default=charge, metavar="TIMES",
        help=f"count a policy's own measured time so many times ({charge:g})")  # fmt: skip
    add("--noise", type=number(0, 10), default=NOISE, metavar="SD",
        help=f"standard deviation of the log of times that policies see ({NOISE:g})")  # fmt: skip
    add("--json", metavar="FILE", help="all figures, for programs")


def _player(name: str, scene: Scene, k_max: int, charge: float, noise: float, seed: int) -> Player:
    """Return a player of a new controller of VARIANTS, which sees noisy timings."""
    controller = VARIANTS[name](k_max, stops=scene.stops)
    controller.costs.set_profile(scene.profile)
    factor = partial(np.random.default_rng([seed, 10**6]).lognormal, 0.0, noise)
    return Player(
        controller, scene.costs, noise=factor, budget=scene.budget, stops=scene.stops, charge=charge
    )


def play(
    scene: Scene, policies: Sequence[str], *, k_max: int, charge: float, noise: float = NOISE,
    seed: int = 0, passes: int = 1,
) -> Played:  # fmt: skip
    """Play every fixed K, and the named policies for `passes` passes, of which the last counts.
    `charge`: how many times a policy's own time is added."""
    players = [_player(name, scene, k_max, charge, noise, seed) for name in policies]
    fixed = [
        scene.score(f"K={k}", Player(FixedK(k), scene.costs, budget=scene.budget))
        for k in range(k_max + 1)
    ]
    scores = [
        [scene.score(name, player) for _ in range(passes)][-1]
        for name, player in zip(policies, players, strict=True)
    ]
    return Played(scene.name, scene.tokens, fixed, scores, [player.took for player in players])


def policy_table(played: Sequence[Played]) -> list[str]:
    """Return a table with a line per policy and reference, over all scenes and their common Ks."""
    titles = ["policy", "seconds", "tokens/s", "drafts/round", "accepted", "switches/1k"]
    titles += ["us, B=1", "us, B=32", "vs K=0", "vs best fixed", "vs oracle"]
    titles += [f"vs {score.name}" for score in played[0].policies[:1]]
    rows = [[*titles, ">2% slower"]]
    first = min(len(scene.fixed) for scene in played)
    each = ([*scene.fixed[:first], *scene.policies, scene.oracle] for scene in played)
    for i, scores in enumerate(zip(*each, strict=True)):
        own = [scene.own[i - first] for scene in played if 0 <= i - first < len(scene.own)]
        rows.append([*_figures(scores, played), *_own_time(own), *_ratios(scores, played)])
    best = [scene.best for scene in played]
    name = "best fixed K in hindsight"
    rows.append([name, *_figures(best, played)[1:], "-", "-", *_ratios(best, played)])
    return [
        "time relative to a reference, negative is faster: geometric mean (the worst)",
        *table(rows),
    ]


def _figures(scores: Sequence[Score], played: Sequence[Played]) -> list[str]:
    seconds, rounds = sum(score.total for score in scores), sum(sum(s.rounds) for s in scores)
    proposed, accepted = sum(s.proposed for s in scores), sum(s.accepted for s in scores)
    drafts = sum(sum(score.drafted) for score in scores) / max(rounds, 1)
    switches = 1000 * sum(score.switches for score in scores) / max(rounds, 1)
    return [
        scores[0].name,
        f"{seconds:.3f}",
        f"{sum(scene.tokens for scene in played) / seconds:.1f}",
        f"{drafts:.2f}",
        f"{100 * accepted / proposed:.1f}%" if proposed else "-",
        f"{switches:.0f}",
    ]


def _own_time(own: Sequence[Sequence[tuple[int, float]]]) -> list[str]:
    """Return the controller's own microseconds per round, with 1 and with 32 sequences."""
    found = [[s for took in own for size, s in took if size == batch] for batch in (1, 32)]
    return [f"{1e6 * median(seconds):.0f}" if seconds else "-" for seconds in found]


def _ratios(scores: Sequence[Score], played: Sequence[Played]) -> list[str]:
    cells = []
    to = [(p.fixed[0], p.best, p.oracle, *p.policies[:1]) for p in played]
    for references in zip(*to, strict=True):
        ratios = [a.total / b.total for a, b in zip(scores, references, strict=True)]
        worst = f" ({100 * (max(ratios) - 1):+.1f}%)" if len(ratios) > 1 else ""
        cells.append(f"{100 * (geometric_mean(ratios) - 1):+.1f}%{worst}")
    slower = sum(s.total > _SLOWER * p.fixed[0].total for s, p in zip(scores, played, strict=True))
    return [*cells, f"{slower} of {len(scores)}"]
