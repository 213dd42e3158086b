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
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from engine.arguments import Parser, exit_code, number, show, whole
from engine.lab.files import writable, write_text
from engine.lab.replay.policies import ALLOWED, build_policy
from engine.lab.replay.reactions import after_drop, back_from_off
from engine.lab.replay.run import MOST_CHARGE, geometric_mean
from engine.lab.replay.scores import References, Score, play, references
from engine.lab.replay.worlds import random_world

_SLOWER = 1.02  # than K = 0: what a world may not be


@dataclass(frozen=True, slots=True)
class Task:
    """What is played in each world."""

    policies: tuple[str, ...]
    k_max: int
    charge: float


@dataclass(slots=True)
class Played:
    """One world."""

    number: int
    known: References
    scores: dict[str, Score]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the arguments."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("engine.lab.simulate", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; figures are written on the way. Raises EngineError."""
    policies = tuple(dict.fromkeys(parsed.policy or ["adaptive"]))
    task = Task(policies, parsed.k_max, parsed.charge)
    writable({"--json": parsed.json})
    for name in policies:
        build_policy(name, task.k_max)
    numbers = range(parsed.first, parsed.first + parsed.worlds)
    with multiprocessing.Pool(parsed.processes) as pool:
        played = pool.map(partial(play_world, task=task), numbers, chunksize=1)
        lines = table(played, task)
        if parsed.each:
            lines += each(played)
        if parsed.reactions:
            lines += pool.starmap(reaction, [(task, name, parsed.reactions) for name in policies])
    if parsed.json:
        write_text(parsed.json, json.dumps(as_json(played)) + "\n")
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
        "--reactions", type=whole(0, 10**6), default=20, metavar="SEEDS",
        help="runs of each of the two changes that a policy must react to (20; 0: none)",
    )  # fmt: skip
    parser.add_argument("--each", action="store_true", help="a line for each world as well")
    parser.add_argument(
        "--processes", type=whole(1, 1024), default=2, metavar="N", help="worlds at a time (2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures, for programs")
    return parser


def play_world(number: int, task: Task) -> Played:
    """All policies and references in one world."""
    world = random_world(number)
    scores = {
        name: play(world, build_policy(name, task.k_max), charge=task.charge)
        for name in task.policies
    }
    return Played(number, references(world, task.k_max), scores)


def table(played: Sequence[Played], task: Task) -> list[str]:
    """A line for each policy and reference."""
    numbers = f"{played[0].number} to {played[-1].number}"
    charged = f"its own time counted {task.charge:g} times" if task.charge else "its own time free"
    lines = [
        f"{len(played)} worlds, {numbers}; K up to {task.k_max}; {charged}",
        "time relative to a reference: geometric mean (worst world); negative is faster",
        f"{'policy':28s} {'vs K=0':>18s} {'vs best fixed K':>18s} {'vs phase oracle':>18s}"
        f" {'vs clairvoyant':>18s} {'>2% slower':>10s} {'switches/1k':>12s}"
        f" {'us, B=1':>9s} {'us, B=32':>9s}",
    ]
    for name in task.policies:
        scores = [world.scores[name] for world in played]
        lines.append(_line(name, [score.total for score in scores], played) + _habits(scores))
    for name, seconds in (
        ("best fixed K in hindsight", [world.known.best_fixed for world in played]),
        ("oracle: best K by phase", [world.known.oracle for world in played]),
        ("clairvoyant: knows all hits", [sum(world.known.clairvoyant) for world in played]),
    ):
        lines.append(_line(name, seconds, played))
    return lines


def _line(name: str, seconds: Sequence[float], played: Sequence[Played]) -> str:
    known = [world.known for world in played]
    cells = [
        _ratio(seconds, [each.plain for each in known]),
        _ratio(seconds, [each.best_fixed for each in known]),
        _ratio(seconds, [each.oracle for each in known]),
        _ratio(seconds, [sum(each.clairvoyant) for each in known]),
    ]
    slower = sum(s > _SLOWER * each.plain for s, each in zip(seconds, known, strict=True))
    return f"{name:28s} {' '.join(cells)} {slower:4d} of {len(seconds):3d}"


def _ratio(seconds: Sequence[float], reference: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
    mean, worst = geometric_mean(ratios) - 1, max(ratios) - 1
    return f"{100 * mean:+7.1f}% ({100 * worst:+6.1f}%)"


def _habits(scores: Sequence[Score]) -> str:
    pairs = max(sum(score.pairs for score in scores), 1)
    switches = 1000 * sum(score.switches for score in scores) / pairs
    regime = 1000 * sum(score.regime_switches for score in scores) / pairs
    alone = _took([seconds for score in scores for seconds in score.alone_seconds])
    many = _took([seconds for score in scores for seconds in score.controller_seconds])
    return f" {switches:5.0f} ({regime:4.0f}) {alone} {many}"


def _took(seconds: Sequence[float]) -> str:
    """Microseconds, the median."""
    return f"{1e6 * median(seconds):9.0f}" if seconds else f"{'-':>9s}"


def each(played: Sequence[Played]) -> list[str]:
    """A line for each world: its load and machine, and every policy's time."""
    lines = [
        "",
        "each world: ridge, draft step; batch and acceptance by phase; vs best fixed K, oracle",
    ]
    for world in played:
        spec, known = random_world(world.number), world.known
        phases = " ".join(f"{p.batch}x{p.acceptance[0]:.2f}" for p in spec.phases)
        step = spec.machine.draft_step / spec.machine.weights
        facts = (
            f"{world.number}: {spec.machine.ridge:4.0f} {100 * step:3.0f}% blur {spec.text.blur:g}"
        )
        found = " | ".join(
            f"{100 * (score.total / known.best_fixed - 1):+6.1f}%"
            f" {100 * (score.total / known.oracle - 1):+6.1f}%"
            for score in world.scores.values()
        )
        lines.append(f"{facts}  {phases:36s} {found}")
    return lines


def reaction(task: Task, name: str, seeds: int) -> str:
    """A line on how fast a policy reacts: median rounds, and the worst."""
    build = partial(build_policy, name, task.k_max)
    drops = [after_drop(build, seed) for seed in range(seeds)]
    backs = [back_from_off(build, seed) for seed in range(seeds)]
    return (
        f"{name}: after a drop .9 to .3 at B=4 {median(drops):.0f} rounds (worst {max(drops)}),"
        f" back from off at B=32 {median(backs):.0f} rounds (worst {max(backs)}); {seeds} runs each"
    )


def as_json(played: Sequence[Played]) -> list[dict[str, object]]:
    """Seconds by world, policy and reference."""
    return [
        {
            "world": world.number,
            "fixed": world.known.fixed,
            "clairvoyant": world.known.clairvoyant,
            "policies": {name: score.seconds for name, score in world.scores.items()},
        }
        for world in played
    ]


if __name__ == "__main__":
    sys.exit(main())
