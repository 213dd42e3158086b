"""`python -m engine.lab.replay.ablate TRACE...`: which refinements of the controller pay.

Plays the controller and, in turn, the controller without one of its refinements. `first`: on a
trace that it sees for the first time; `again`: when it has just played it, so that only what it
goes on learning counts. Rates are relative to the whole controller: below 1, the refinement pays.
`foredraft bench record` makes traces; a folder stands for all of those in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.arguments import Parser, exit_code, number, show, whole
from engine.control.controller import FixedK
from engine.errors import TraceError
from engine.lab.files import writable, write_json
from engine.lab.replay.costs import MeasuredCosts
from engine.lab.replay.play import MOST_CHARGE, Noise, Player
from engine.lab.replay.recorded import Recorded, recorded
from engine.lab.replay.scores import geometric_mean
from engine.lab.replay.variants import STOP, VARIANTS, WHOLE
from engine.lab.replay.worlds import NOISE
from engine.step.trace import read_trace

_PASSES = ("first", "again")

Reference = Callable[["Judged", int], float]  # seconds, of a pass


@dataclass(slots=True)
class Judged:
    """One trace: seconds of every fixed K, and of each variant by pass, a mean over seeds."""

    name: str
    batch: int  # most sequences in a step
    fixed: list[float]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return min(self.fixed)


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
    return "\n".join(table(judged))


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
    trace = read_trace(path)
    told, costs = recorded(trace), MeasuredCosts(trace)
    k_max, budget = trace.header.k_max, trace.header.max_step_tokens
    if not k_max:
        raise TraceError(f"{path}: K could only be 0 there, so there was nothing to choose")
    fixed = [_seconds(told, Player(FixedK(k), costs, budget=budget)) for k in range(k_max + 1)]
    batch = max(len(step.parts) for step in trace.steps)
    judged = Judged(path.stem, batch, fixed)
    stops = stops or trace.header.stops
    for name, build in VARIANTS.items():
        if name == STOP and not stops:
            continue
        plays = []
        for seed in range(seeds):
            controller = build(k_max, stops=stops)
            controller.profile(trace.header.profile)
            player = Player(
                controller, costs, noise=Noise(NOISE, seed), budget=budget, stops=stops,
                charge=charge,
            )  # fmt: skip
            plays.append([_seconds(told, player) for _ in _PASSES])
        judged.seconds[name] = [sum(each) / seeds for each in zip(*plays, strict=True)]
    return judged


def _seconds(told: Recorded, player: Player) -> float:
    return sum(step.seconds for step in player.play(told.workload()))


def table(judged: Sequence[Judged]) -> list[str]:
    """A line for each variant, then one for each trace."""
    sizes = sorted({each.batch for each in judged})
    lines = [
        f"{len(judged)} traces; tokens per second relative to the whole controller, geometric mean",
        f"{'':22s} {'first':>6s} {'again':>6s} {'worst':>6s} {'best':>6s}  again, by sequences: "
        + " ".join(f"{size:>6d}" for size in sizes),
    ]
    for name in judged[0].seconds:
        if name != WHOLE:
            lines.append(_line(name, judged, sizes, lambda each, i: each.seconds[WHOLE][i]))
    lines += ["", "relative to the best fixed K in hindsight"]
    for name in judged[0].seconds:
        lines.append(_line(name, judged, sizes, lambda each, i: each.best))
    return lines + ["", *_each(judged)]


def _line(name: str, judged: Sequence[Judged], sizes: Sequence[int], reference: Reference) -> str:
    rates = [
        [reference(each, i) / each.seconds[name][i] for each in judged] for i in range(len(_PASSES))
    ]
    first, again = (geometric_mean(each) for each in rates)
    by_size = [
        geometric_mean([r for r, each in zip(rates[1], judged, strict=True) if each.batch == size])
        for size in sizes
    ]
    return (
        f"{name:22s} {first:6.3f} {again:6.3f} {min(rates[1]):6.3f} {max(rates[1]):6.3f}"
        f"{'':24s}" + " ".join(f"{rate:6.3f}" for rate in by_size)
    )


def _each(judged: Sequence[Judged]) -> list[str]:
    """A line for each trace."""
    names = [name for name in judged[0].seconds if name != WHOLE]
    lines = [
        "each trace, again: the whole controller by K=0 and by the best fixed K; then each variant"
        " by it, in the order above"
    ]
    for each in judged:
        whole = each.seconds[WHOLE][1]
        best = each.fixed.index(each.best)
        rates = " ".join(f"{whole / each.seconds[name][1]:5.2f}" for name in names)
        lines.append(
            f"{each.name:28s} {each.fixed[0] / whole:5.2f} {each.best / whole:5.2f} of K={best}"
            f"  {rates}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
