"""`python -m engine.lab.replay.ablate TRACE...`: which refinements of the controller pay.

Plays the controller and, in turn, the controller without one of its refinements, which shows in the
column `vs adaptive`: above 0 the refinement pays. `foredraft bench record` makes traces; a folder
stands for all of those in it. Over random worlds: `engine.lab.simulate --policy adaptive --policy
"no hindsight"` and so on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from engine.arguments import Parser, exit_code, number, show, whole
from engine.errors import TraceError
from engine.lab.files import writable, write_json
from engine.lab.replay.play import MOST_CHARGE
from engine.lab.replay.recorded import Recorded, recorded
from engine.lab.replay.scores import play, policy_table, seconds_of
from engine.lab.replay.variants import STOP, VARIANTS
from engine.step.trace import read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("engine.lab.replay.ablate", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; figures are written on the way. Raises EngineError."""
    paths = files(parsed.traces)
    writable({"--json": parsed.json}, reads=paths)
    scenes = [read(path) for path in paths]
    names = [name for name in VARIANTS if name != STOP or all(scene.stops for scene in scenes)]
    played = [
        play(
            scene, names, k_max=scene.trace.header.k_max, charge=parsed.charge, seed=seed,
            passes=parsed.passes,
        )
        for scene, seed in product(scenes, range(parsed.seeds))
    ]  # fmt: skip
    if parsed.json is not None:
        write_json(parsed.json, seconds_of(played))
    return "\n".join([f"{len(scenes)} traces, {parsed.seeds} plays of each", *policy_table(played)])


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("python -m engine.lab.replay.ablate", __doc__)
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="files, or folders of *.jsonl")
    add("--seeds", type=whole(1, 100), default=2, metavar="N",
        help="plays of each variant, with other noise of the timings (2)")  # fmt: skip
    add("--passes", type=whole(1, 100), default=2, metavar="N",
        help="over a trace by the same controller; the last one counts (2)")  # fmt: skip
    add("--charge", type=number(0, MOST_CHARGE), default=1.0, metavar="TIMES",
        help="count a controller's own measured time so many times (1)")  # fmt: skip
    add("--json", metavar="FILE", help="seconds by trace, for programs")
    return parser


def files(names: Sequence[str]) -> list[Path]:
    """Folders replaced by their traces, in order. Raises TraceError."""
    found = []
    for name in names:
        path = Path(name)
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise TraceError(f"the folder {name!r} holds no traces (*.jsonl)")
        found += inside
    return found


def read(path: Path) -> Recorded:
    """Raises TraceError where there was nothing to choose, too."""
    scene = recorded(read_trace(path), path.stem)
    if not scene.trace.header.k_max:
        raise TraceError(f"{path}: K could only be 0 there, so there was nothing to choose")
    return scene


if __name__ == "__main__":
    sys.exit(main())
