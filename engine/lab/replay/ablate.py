"""`python -m engine.lab.replay.ablate TRACE...`: which refinements of the controller pay.

Plays the controller and, in turn, the controller without one of its refinements. `first`: on a
trace that it sees for the first time; `again`: when it has just played it, so that only what it
goes on learning counts. Rates are relative to the whole controller: below 1, the refinement pays.
`foredraft bench record` makes traces; a folder stands for all of those in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean

from engine.arguments import Parser, exit_code, number, show, whole
from engine.errors import TraceError
from engine.lab.comparison.report import table
from engine.lab.files import writable, write_json
from engine.lab.replay.play import MOST_CHARGE
from engine.lab.replay.recorded import recorded
from engine.lab.replay.scores import play_fixed, player_of
from engine.lab.replay.variants import STOP, VARIANTS, WHOLE
from engine.step.trace import read_trace

_PASSES = ("first", "again")


@dataclass(slots=True)
class Judged:
    """One trace: seconds of every fixed K, and of each variant by pass, a mean over seeds."""

    name: str
    batch: int  # most sequences in a step
    fixed: list[float]
    seconds: dict[str, list[float]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("engine.lab.replay.ablate", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; figures are written on the way. Raises EngineError."""
    paths = files(parsed.traces)
    writable({"--json": parsed.json}, reads=paths)
    judged = [
        judge(path, seeds=parsed.seeds, charge=parsed.charge, stops=parsed.stops) for path in paths
    ]
    if parsed.json is not None:
        write_json(parsed.json, {each.name: [each.fixed, each.seconds] for each in judged})
    return "\n".join(tables(judged))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("python -m engine.lab.replay.ablate", __doc__)
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="files, or folders of *.jsonl")
    add("--seeds", type=whole(1, 100), default=2, metavar="N",
        help="plays of each variant, with other noise of the timings (2)")  # fmt: skip
    add("--charge", type=number(0, MOST_CHARGE), default=1.0, metavar="TIMES",
        help="count a controller's own measured time so many times (1)")  # fmt: skip
    add("--stops", action="store_true",
        help="as if drafting could always stop between two steps")  # fmt: skip
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


def judge(path: Path, *, seeds: int, charge: float, stops: bool) -> Judged:
    """All variants on one trace. Raises TraceError."""
    scene = recorded(read_trace(path), path.stem)
    scene = replace(scene, stops=stops or scene.stops)
    k_max = scene.trace.header.k_max
    if not k_max:
        raise TraceError(f"{path}: K could only be 0 there, so there was nothing to choose")
    fixed = [score.total for score in play_fixed(scene, k_max)]
    judged = Judged(path.stem, max(len(step.parts) for step in scene.trace.steps), fixed)
    for name in VARIANTS:
        if name == STOP and not scene.stops:
            continue
        plays = []
        for seed in range(seeds):
            player = player_of(name, scene, k_max, charge=charge, seed=seed)
            plays.append([scene.score(name, player).total for _ in _PASSES])
        judged.seconds[name] = [sum(each) / seeds for each in zip(*plays, strict=True)]
    return judged


def tables(judged: Sequence[Judged]) -> Iterator[str]:
    """A line for each variant, then one for each trace."""
    yield (
        f"{len(judged)} traces; tokens per second relative to the whole controller (`{WHOLE}`),"
        " geometric mean"
    )
    names = [name for name in judged[0].seconds if name != WHOLE]
    yield from _by_variant(names, judged, lambda each, i: each.seconds[WHOLE][i])
    yield from ("", "relative to the best fixed K in hindsight")
    yield from _by_variant([WHOLE, *names], judged, lambda each, _: min(each.fixed))
    yield from ("", "each trace, again")
    rows = [["", "against K=0", "against best fixed", "best K", *names]]
    for each in judged:
        whole_, best = each.seconds[WHOLE][1], min(each.fixed)
        rates = [each.fixed[0] / whole_, best / whole_]
        shown = [f"{rate:.2f}" for rate in rates] + [str(each.fixed.index(best))]
        rows.append([each.name, *shown, *(f"{whole_ / each.seconds[n][1]:.2f}" for n in names)])
    yield from table(rows)


def _by_variant(
    names: Sequence[str], judged: Sequence[Judged], reference: Callable[[Judged, int], float]
) -> list[str]:
    """`reference`: seconds of a pass over a trace. Worst, best and by sequences: of `again`."""
    sizes = sorted({each.batch for each in judged})
    rows = [["", *_PASSES, "worst", "best", *(f"batch {size}" for size in sizes)]]
    for name in names:
        first, again = (
            [reference(each, i) / each.seconds[name][i] for each in judged]
            for i in range(len(_PASSES))
        )
        by_size = [
            geometric_mean(r for r, each in zip(again, judged, strict=True) if each.batch == size)
            for size in sizes
        ]
        found = geometric_mean(first), geometric_mean(again), min(again), max(again), *by_size
        rows.append([name, *(f"{rate:.3f}" for rate in found)])
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
