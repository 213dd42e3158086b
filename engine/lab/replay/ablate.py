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

from engine.arguments import Parser, exit_code, show, whole
from engine.errors import TraceError
from engine.lab.files import writable, write_json
from engine.lab.replay.recorded import Recorded, recorded
from engine.lab.replay.scores import add_options, play, policy_table
from engine.lab.replay.variants import STOP, VARIANTS
from engine.step.trace import read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("engine.lab.replay.ablate", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; figures are written on the way. Raises EngineError."""
    paths = [path for name in parsed.traces for path in files(Path(name))]
    writable({"--json": parsed.json}, reads=paths)
    scenes = [read(path) for path in paths]
    all_stop = all(scene.stops for scene in scenes)
    names = parsed.policy or [name for name in VARIANTS if all_stop or name != STOP]
    played = [
        play(
            scene, names, k_max=scene.trace.header.k_max, charge=parsed.charge, seed=seed,
            passes=parsed.passes,
        )
        for scene, seed in product(scenes, range(parsed.seeds))
    ]  # fmt: skip
    if parsed.json is not None:
        write_json(parsed.json, [scene.as_dict() for scene in played])
    return "\n".join([f"{len(scenes)} traces, {parsed.seeds} plays of each", *policy_table(played)])


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("python -m engine.lab.replay.ablate", __doc__)
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="files, or folders of *.jsonl")
    add("--seeds", type=whole(1, 100), default=2, metavar="N",
        help="plays of each variant, with other noise of the timings (2)")  # fmt: skip
    add("--passes", type=whole(1, 100), default=2, metavar="N",
        help="over a trace by the same controller; the last one counts (2)")  # fmt: skip
    add_options(parser, charge=1.0)
    return parser


def files(path: Path) -> list[Path]:
    """Of a folder its traces, in order. Raises TraceError."""
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not found:
        raise TraceError(f"the folder {str(path)!r} holds no traces (*.jsonl)")
    return found


def read(path: Path) -> Recorded:
    """Raises TraceError where there was nothing to choose, too."""
    scene = recorded(read_trace(path), path.stem)
    if not scene.trace.header.k_max:
        raise TraceError(f"{path}: K could only be 0 there, so there was nothing to choose")
    return scene


if __name__ == "__main__":
    sys.exit(main())
