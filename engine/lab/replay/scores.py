"""Policies on scenes (a recorded trace, a random world): what each takes, beside every fixed K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean, median

import numpy as np

from engine.control.controller import FixedK
from engine.lab.comparison.report import table
from engine.lab.replay.play import Player, Score
from engine.lab.replay.recorded import Recorded
from engine.lab.replay.variants import build_policy
from engine.lab.replay.worlds import World

NOISE = 0.05  # of a timing that a controller sees: standard deviation of its logarithm
ORACLE = "oracle: best K by phase"
_SLOWER = 1.02  # than K = 0: what a policy may not be


# What policies are played on, all on the same bits.
Scene = Recorded | World


@dataclass(slots=True)
class Played:
    """All policies on one scene. `own`: by policy, the batch and the controller's own seconds of
    each round."""

    name: str
    tokens: int
    fixed: list[Score]  # by K, from 0
    policies: list[Score]
    own: list[list[tuple[int, float]]]

    @property
    def best(self) -> Score:
        """The best K for all of it, in hindsight."""
        return min(self.fixed, key=lambda score: score.total)

    @property
    def oracle(self) -> Score:
        """The best K of each phase, known beforehand."""
        phases = range(len(self.fixed[0].seconds))
        best = [min(self.fixed, key=lambda score: score.seconds[i]) for i in phases]
        return Score(
            ORACLE,
            [score.seconds[i] for i, score in enumerate(best)],
            [score.rounds[i] for i, score in enumerate(best)],
            [score.drafted[i] for i, score in enumerate(best)],
        )

    @property
    def all(self) -> list[Score]:
        return [*self.fixed, *self.policies, self.oracle]


def _player(policy: str, scene: Scene, k_max: int, *, charge: float, seed: int) -> Player:
    """A fresh controller of that name, which sees its timings with the noise of a measurement."""
    controller = build_policy(policy, k_max, stops=scene.stops)
    controller.profile(scene.profile)
    noise = partial(np.random.default_rng([seed, 10**6]).lognormal, 0.0, NOISE)
    return Player(
        controller, scene.costs, noise=noise, budget=scene.budget, stops=scene.stops, charge=charge
    )


def play(
    scene: Scene, policies: Sequence[str], *, k_max: int, charge: float, seed: int = 0,
    passes: int = 1,
) -> Played:  # fmt: skip
    """Every fixed K, and the named policies, of whose passes the last one counts. `charge`: how
    many times a policy's own time does. Raises ConfigError."""
    players = [_player(name, scene, k_max, charge=charge, seed=seed) for name in policies]
    fixed = [
        scene.score(f"K={k}", Player(FixedK(k), scene.costs, budget=scene.budget))
        for k in range(k_max + 1)
    ]
    scores = [
        [scene.score(name, player) for _ in range(passes)][-1]
        for name, player in zip(policies, players, strict=True)
    ]
    return Played(scene.name, scene.tokens, fixed, scores, [player.took for player in players])


def seconds_of(played: Sequence[Played]) -> list[dict[str, object]]:
    """For programs: by scene, policy and phase."""
    return [
        {
            "name": scene.name,
            "fixed": [score.seconds for score in scene.fixed],
            "policies": {score.name: score.seconds for score in scene.policies},
        }
        for scene in played
    ]


def policy_table(played: Sequence[Played]) -> list[str]:
    """A line for each policy and reference, over all scenes; a K that all of them played."""
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
    """The controller's own microseconds in a round, with 1 and with 32 sequences."""
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
