"""`python -m engine.lab.simulate`: test the controller in random worlds it was not tuned on.

Each world has four phases. Its number is the random seed for acceptance, batch size, machine,
burstiness, the informativeness of confidences and the error of the start-up profile. Times are
relative to a reference on the same text; negative is faster. No model runs and the clock is
simulated, so the table is the same on every machine, except for the controller's own time.

Worlds 100 to 299 are for development; 1000 to 1049 were used when the rule was designed. Worlds
from 5000 on are the test set: look at them once, after the last change."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.arguments import Parser, exit_code, show, whole
from engine.lab.files import writable, write_json
from engine.lab.replay.scores import Played, add_options, play, policy_table
from engine.lab.replay.variants import WHOLE
from engine.lab.replay.worlds import random_world


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 for invalid arguments."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("engine.lab.simulate", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """Return the text to print, and write the --json file. Raises EngineError."""
    writable({"--json": parsed.json})
    numbers = range(parsed.first, parsed.first + parsed.worlds)
    options = {"k_max": parsed.k_max, "charge": parsed.charge, "noise": parsed.noise}
    task = partial(play_world, policies=parsed.policy or [WHOLE], **options)
    with multiprocessing.Pool(parsed.processes) as pool:
        played = pool.map(task, numbers, chunksize=1)
    write_json(parsed.json, [world.as_dict() for world in played])
    worlds = f"{len(played)} worlds, {numbers[0]} to {numbers[-1]}; K up to {parsed.k_max}; "
    timings = f"noise {parsed.noise:g}; controller time counted {parsed.charge:g} times"
    return "\n".join([worlds + timings, *policy_table(played)])


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("python -m engine.lab.simulate", __doc__)
    add = parser.add_argument
    add("--worlds", type=whole(1, 10**6), default=50, metavar="N", help="how many (50)")
    add("--first", type=whole(0, 10**9), default=5000, metavar="N",
        help="number of the first (5000: test; 100: development)")  # fmt: skip
    add("--k-max", type=whole(1, 15), default=12, metavar="K", help="largest K (12)")
    add("--processes", type=whole(1, 1024), default=2, metavar="N", help="worlds at a time (2)")
    add_options(parser, charge=0.0)
    return parser


def play_world(number: int, **options: Any) -> Played:
    """Play every fixed K and the policies in one world. `options`: see `play`."""
    return play(random_world(number), seed=number, **options)


if __name__ == "__main__":
    sys.exit(main())
