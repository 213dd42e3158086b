"""`python -m engine.lab.replay TRACE` is `foredraft replay`: other policies on what was recorded.

Set `speculation.trace` to a file name to record steps while serving: sizes, times, and whether
guesses were right, but no text. Requests, arrivals and hits are then the same for every policy, so
accepted lengths are exact wherever the guess is known; times are means of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.arguments import Parser, exit_code, number, show, whole
from engine.lab.comparison.report import table
from engine.lab.files import write_json
from engine.lab.picture import check_results, picture
from engine.lab.replay.play import MOST_CHARGE, Score
from engine.lab.replay.recorded import Recorded, check, recorded
from engine.lab.replay.scores import Played, play, policy_table
from engine.lab.replay.variants import ALLOWED
from engine.step.trace import Trace, read_trace

_K_MAX = 8
_MOST_PHASES = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft replay", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; files are written on the way. Raises EngineError."""
    check_results(parsed.json, parsed.plot, reads=[parsed.trace])
    trace = read_trace(Path(parsed.trace))
    k_max = max(trace.header.k_max, _K_MAX) if parsed.k_max is None else parsed.k_max
    found = compare(trace, parsed.policy or ["adaptive"], k_max=k_max, charge=parsed.charge)
    if parsed.plot is not None:
        draw(found, parsed.plot)
    if parsed.json is not None:
        write_json(parsed.json, found.as_json())
    return "\n".join(report(found))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft replay", __doc__)
    add = parser.add_argument
    add("trace", metavar="TRACE", help="what `speculation.trace` recorded")
    add("--policy", action="append", metavar="NAME", help=f"{ALLOWED}; may be repeated (adaptive)")
    add("--k-max", type=whole(1, 16), metavar="K",
        help=f"largest K (the trace's, at least {_K_MAX})")  # fmt: skip
    add("--charge", type=number(0, MOST_CHARGE), default=1.0, metavar="TIMES",
        help="count a policy's own measured time so many times (1)")  # fmt: skip
    add("--plot", metavar="FILE.png", help="draw it (needs foredraft[plots])")
    add("--json", metavar="FILE", help="all figures, for programs")
    return parser


@dataclass(slots=True)
class Comparison:
    """All policies on one trace, and how well the replay repeats what was recorded. `same` and
    `other`: sequences whose accepted length came out as recorded, or not, round by round."""

    told: Recorded
    played: Played
    repeated_seconds: float
    same: int
    other: int

    def as_json(self) -> dict[str, Any]:
        """Everything, with each policy's regret against the best fixed K."""
        told, played = self.told, self.played
        return {
            "fixed": [asdict(score) for score in played.fixed],
            "policies": [asdict(score) for score in played.policies],
            "oracle": asdict(played.oracle),
            "requests": len(told.requests),
            "tokens": told.tokens,
            "known": told.known,
            "begins": told.begins,
            "sizes": told.sizes,
            "recorded_seconds": told.seconds,
            "repeated_seconds": self.repeated_seconds,
            "same": self.same,
            "other": self.other,
            "best_fixed": played.best.name,
            "regret": {s.name: s.total / played.best.total - 1 for s in played.all},
        }


def compare(trace: Trace, names: Sequence[str], *, k_max: int, charge: float) -> Comparison:
    """Play every fixed K and the named policies. `charge`: how many times a policy's own time
    counts. Raises EngineError."""
    told = recorded(trace)
    played = play(told, list(dict.fromkeys(names)), k_max=k_max, charge=charge)
    return Comparison(told, played, *check(told))


def report(found: Comparison) -> Iterator[str]:
    """The replay's own check, a line for each policy, and the phases."""
    told = found.told
    off = found.repeated_seconds / told.seconds - 1
    yield (
        f"{len(told.requests)} requests, {told.tokens} tokens; the guess is known at"
        f" {100 * told.known:.1f}% of the positions and drawn from these at the others"
    )
    yield (
        f"check: the recorded choices take {found.repeated_seconds:.3f} s here,"
        f" {told.seconds:.3f} s were recorded ({100 * off:+.1f}%); accepted lengths as"
        f" recorded in {found.same} of {found.same + found.other} cases"
    )
    yield from ("", *policy_table([found.played]))
    yield from (f"the best fixed K is {found.played.best.name}", "")
    rows = [["phase from token", "batch", "tokens", "best K", "seconds by policy"]]
    spans = zip(told.begins[:_MOST_PHASES], told.spans, told.sizes, strict=False)
    for i, (begin, span, size) in enumerate(spans):
        best = min(found.played.fixed, key=lambda score: score.seconds[i])
        scores = [found.played.fixed[0], best, *found.played.policies]
        spent = "  ".join(f"{score.name} {score.seconds[i]:.3f}" for score in scores)
        rows.append([str(begin), f"{size:.1f}", str(span), best.name[2:], spent])
    yield from table(rows)
    if len(told.begins) > _MOST_PHASES:
        yield f"and {len(told.begins) - _MOST_PHASES} more phases"


def draw(found: Comparison, name: str) -> None:
    """Tokens per second, in all and along the trace, and draft lengths, by policy, as a PNG. Raises
    ConfigError where matplotlib is missing or the name does not fit."""
    told, played = found.told, found.played
    edges = [*told.begins, told.tokens]

    def rates(score: Score) -> list[float]:
        return [n / s if s else 0.0 for n, s in zip(told.spans, score.seconds, strict=True)]

    with picture(name, (10, 9)) as figure:
        bars, along, drafts = figure.subplots(3, 1)
        bars.bar(range(len(played.all)), [told.tokens / score.total for score in played.all])
        bars.axhline(told.tokens / played.best.total, color="grey", linewidth=0.8)
        names = [score.name.partition(":")[0] for score in played.all]
        bars.set_xticks(range(len(names)), names, rotation=30, ha="right")
        bars.set_ylabel("tokens per second")
        shown = {score.name: score for score in (played.fixed[0], played.best, *played.policies)}
        for label, score in shown.items():
            along.stairs(rates(score), edges, label=label, baseline=None)
            forwards = [n / max(m, 1) for n, m in zip(score.drafted, score.rounds, strict=True)]
            drafts.stairs(forwards, edges, label=label, baseline=None)
        along.set_ylabel("tokens per second")
        along.legend(loc="best", fontsize="small")
        drafts.set_ylabel("draft forwards per round")
        drafts.set_xlabel("tokens generated")
        figure.suptitle(f"{len(told.requests)} requests, {told.tokens} tokens, replayed")


if __name__ == "__main__":
    sys.exit(main())
