"""Measure the host time of a step outside its forwards: `python -m engine.lab.host_time`.

Engines of several modes decode the same texts in turns. Prints a line per batch size and mode, with
mean microseconds per step in which all sequences decode: in forwards, on the host, and the host
time by part of the step (`messages.StepSeconds`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import mean

from engine.arguments import Parser, exit_code, whole
from engine.lab.bench.offline import Offline
from engine.lab.bench.options import add_pair, clock_of, load, set_threads
from engine.lab.comparison.report import table
from engine.lab.comparison.workload import POOL, Arm, Request, parse_arms, pool
from engine.messages import StepSeconds

TOKENS = 48  # per reply
HEADS = (
    *("", "mode", "forwards", "host"),
    *("schedule", "propose", "verify", "accept", "commit", "emit", "around"),
)


def parts_of(seconds: StepSeconds) -> list[float]:
    """Return the columns of HEADS: seconds in forwards, on the host, and by part of the step."""
    s = seconds
    host = [s.schedule, s.propose - s.propose_forward, s.verify - s.verify_forward]
    host += [s.accept, s.commit, s.emit, s.around]
    return [s.propose_forward + s.verify_forward, sum(host), *host]


def show(parsed: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises EngineError."""
    arms, clock = parse_arms(parsed.modes), clock_of(parsed)
    set_threads(parsed.threads)
    config, pair, encode = load(parsed)
    player = Offline(
        config, pair, encode, arms,
        concurrency=max(parsed.sequences), prompts=POOL, reply=TOKENS, clock=clock,
    )  # fmt: skip
    rows, texts = [list(HEADS)], pool("code")
    for size in parsed.sequences:
        steps: dict[Arm, list[list[float]]] = {arm: [] for arm in arms}
        for round_ in range(parsed.rounds + 1):
            places = range(round_ * size, (round_ + 1) * size)
            lanes = [[Request(texts[at % len(texts)], 1.0, at, TOKENS)] for at in places]
            for arm, run in player.round(arms, lanes).items():
                found = map(parts_of, run.steps.decoding)
                steps[arm] += found if round_ else []  # the first round is a warm-up
        for arm, each in steps.items():
            means = [f"{1e6 * mean(part):.0f}" for part in zip(*each, strict=True)]
            rows.append([f"x{size}", arm.name, *means])
    print("\n".join(table(rows, left=2)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m engine.lab.host_time", __doc__)
    add_pair(parser)
    add = parser.add_argument
    add("--sequences", type=whole(1, 256), nargs="+", default=[1, 4, 16], help="at a time")
    add("--modes", default="off,4,auto", help="off, auto, or a number K")
    add("--rounds", type=whole(1, 1000), default=8, help="texts of each sequence")
    parsed = parser.parse_args(arguments)
    return exit_code(parser.prog, lambda: show(parsed))


if __name__ == "__main__":
    sys.exit(main())
