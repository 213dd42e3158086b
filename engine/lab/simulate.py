"""`python -m engine.lab.simulate`: the controller in random worlds that it was not tuned on.

Each world has four phases: acceptance, batch, machine, burstiness, the worth of confidences and the
error of the start-up profile are drawn from its number. Times are relative to those of a reference
on the same text; negative is faster. No model is run, and the clock is the worlds', so that the
table is the same on every machine, but for the controller's own time.

Worlds 100 to 299 are for development, 1000 to 1049 were seen when the rule was designed. Worlds
from 5000 on are the test: look at them once, after the last change.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from engine.arguments import Parser, exit_code, number, show, whole
from engine.control.controller import FixedK
from engine.lab.files import writable, write_json
from engine.lab.replay.play import MOST_CHARGE, Noise, Player
from engine.lab.replay.scores import (
    ALLOWED,
    Score,
    best_of,
    build_policy,
    geometric_mean,
    oracle_of,
)
from engine.lab.replay.worlds import NOISE, random_world

_SLOWER = 1.02  # than K = 0: what a world may not be


@dataclass(slots=True)
class Played:
    """One world: every fixed K, and each policy with what its rounds took it: batch, seconds."""

    number: int
    fixed: list[Score]
    policies: list[tuple[Score, list[tuple[int, float]]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the arguments."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("engine.lab.simulate", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; figures are written on the way. Raises EngineError."""
    names = list(dict.fromkeys(parsed.policy or ["adaptive"]))
    writable({"--json": parsed.json})
    for name in names:
        build_policy(name, parsed.k_max)
    numbers = range(parsed.first, parsed.first + parsed.worlds)
    task = partial(play_world, names=names, k_max=parsed.k_max, charge=parsed.charge)
    with multiprocessing.Pool(parsed.processes) as pool:
        played = pool.map(task, numbers, chunksize=1)
    charged = f"its own time counted {parsed.charge:g} times" if parsed.charge else "own time free"
    lines = [
        f"{len(played)} worlds, {numbers[0]} to {numbers[-1]}; K up to {parsed.k_max}; {charged}",
        *table(played),
    ]
    if parsed.json:
        write_json(parsed.json, as_json(played))
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("python -m engine.lab.simulate", __doc__)
    parser.add_argument(
        "--worlds", type=whole(1, 10**6), default=50, metavar="N", help="how many (50)"
    )
    parser.add_argument(
        "--first", type=whole(0, 10**9), default=5000, metavar="N",
        help="number of the first (5000: test; 100: development)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help=f"{ALLOWED}; may be repeated (adaptive)"
    )
    parser.add_argument(
        "--k-max", type=whole(1, 256), default=12, metavar="K", help="largest K (12)"
    )
    parser.add_argument(
        "--charge", type=number(0, MOST_CHARGE), default=0.0, metavar="TIMES",
        help="count the controller's own measured time so many times in the worlds' clock (0)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=whole(1, 1024), default=2, metavar="N", help="worlds at a time (2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, for programs")
    return parser


def play_world(number: int, names: Sequence[str], k_max: int, charge: float) -> Played:
    """All policies and every fixed K in one world."""
    world = random_world(number)
    fixed = [world.score(f"K={k}", Player(FixedK(k), world.machine)) for k in range(k_max + 1)]
    policies = []
    for name in names:
        controller = build_policy(name, k_max)
        controller.profile(world.profiled.profile())
        noise = Noise(NOISE, world.seed)
        player = Player(controller, world.machine, noise=noise, charge=charge)
        policies.append((world.score(name, player), player.took))
    return Played(number, fixed, policies)


def table(played: Sequence[Played]) -> list[str]:
    """A line for each policy and reference."""
    lines = [
        "time relative to a reference: geometric mean (worst world); negative is faster",
        f"{'policy':28s} {'vs K=0':>18s} {'vs best fixed K':>18s} {'vs phase oracle':>18s}"
        f" {'>2% slower':>10s} {'switches/1k':>12s} {'us, B=1':>9s} {'us, B=32':>9s}",
    ]
    for found in zip(*(world.policies for world in played), strict=True):
        scores = [score for score, _ in found]
        rounds = sum(sum(score.rounds) for score in scores)
        switches = 1000 * sum(score.switches for score in scores) / rounds
        rounds_of = [took for _, each in found for took in each]
        took = [_median([s for size, s in rounds_of if size == batch]) for batch in (1, 32)]
        lines.append(f"{_line(scores, played)} {switches:12.0f} {' '.join(took)}")
    best, oracle = ([f(world.fixed) for world in played] for f in (best_of, oracle_of))
    best = [Score("best fixed K in hindsight", score.seconds) for score in best]
    return [*lines, _line(best, played), _line(oracle, played)]


def _line(scores: Sequence[Score], played: Sequence[Played]) -> str:
    plain = [world.fixed[0] for world in played]
    references = (plain, [best_of(w.fixed) for w in played], [oracle_of(w.fixed) for w in played])
    cells = [_ratio(scores, reference) for reference in references]
    slower = sum(s.total > _SLOWER * p.total for s, p in zip(scores, plain, strict=True))
    return f"{scores[0].name:28s} {' '.join(cells)} {slower:4d} of {len(scores):3d}"


def _ratio(scores: Sequence[Score], reference: Sequence[Score]) -> str:
    ratios = [a.total / b.total for a, b in zip(scores, reference, strict=True)]
    mean, worst = geometric_mean(ratios) - 1, max(ratios) - 1
    return f"{100 * mean:+7.1f}% ({100 * worst:+6.1f}%)"


def _median(seconds: Sequence[float]) -> str:
    """In microseconds."""
    return f"{1e6 * median(seconds):9.0f}" if seconds else f"{'-':>9s}"


def as_json(played: Sequence[Played]) -> list[dict[str, object]]:
    """Seconds by world, policy and phase."""
    return [
        {
            "world": world.number,
            "fixed": [score.seconds for score in world.fixed],
            "policies": {score.name: score.seconds for score, _ in world.policies},
        }
        for world in played
    ]


if __name__ == "__main__":
    sys.exit(main())
