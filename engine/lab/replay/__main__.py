"""`python -m engine.lab.replay TRACE` is `foredraft replay`: other policies on what was recorded.

Set `speculation.trace` to a file name to record steps while serving: sizes, times, and whether
guesses were right, but no text. Requests, arrivals and hits are then the same for every policy, so
accepted lengths are exact wherever the guess is known; times are means of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

from engine.arguments import Parser, exit_code, show, whole
from engine.lab.comparison.report import table
from engine.lab.files import writable, write_json
from engine.lab.replay.recorded import Recorded, check, recorded
from engine.lab.replay.scores import Played, add_options, play, policy_table
from engine.lab.replay.variants import WHOLE
from engine.step.trace import read_trace

_K_MAX = 8
_MOST_PHASES = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft replay", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; figures are written on the way. Raises EngineError."""
    writable({"--json": parsed.json}, reads=[parsed.trace])
    told = recorded(read_trace(Path(parsed.trace)))
    k_max = parsed.k_max or max(told.trace.header.k_max, _K_MAX)
    played = play(told, parsed.policy or [WHOLE], k_max=k_max, charge=parsed.charge)
    if parsed.json is not None:
        more = {"known": told.known, "begins": told.begins, "sizes": told.sizes}
        write_json(parsed.json, {**played.as_dict(), **more, "recorded_seconds": told.seconds})
    return "\n".join(report(told, played))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft replay", __doc__)
    parser.add_argument("trace", metavar="TRACE", help="what `speculation.trace` recorded")
    parser.add_argument("--k-max", type=whole(1, 16), metavar="K",
        help=f"largest K (the trace's, at least {_K_MAX})")  # fmt: skip
    add_options(parser, charge=1.0)
    return parser


def report(told: Recorded, played: Played) -> Iterator[str]:
    """The replay's own check, a line for each policy, and the phases."""
    repeated, same, other = check(told)
    yield (
        f"{len(told.requests)} requests, {told.tokens} tokens; the guess is known at"
        f" {100 * told.known:.1f}% of the positions and drawn from these at the others"
    )
    yield (
        f"check: the recorded choices take {repeated:.3f} s here, {told.seconds:.3f} s were"
        f" recorded ({100 * (repeated / told.seconds - 1):+.1f}%); accepted lengths as recorded in"
        f" {same} of {same + other} cases"
    )
    yield from ("", *policy_table([played]))
    yield from (f"the best fixed K is {played.best.name}", "")
    rows = [["phase from token", "batch", "tokens", "best K", "seconds by policy"]]
    spans = zip(pairwise([*told.begins, told.tokens]), told.sizes, strict=True)
    for i, ((begin, end), size) in enumerate(islice(spans, _MOST_PHASES)):
        best = min(played.fixed, key=lambda score: score.seconds[i])
        scores = [played.fixed[0], best, *played.policies]
        spent = "  ".join(f"{score.name} {score.seconds[i]:.3f}" for score in scores)
        rows.append([str(begin), f"{size:.1f}", str(end - begin), best.name[2:], spent])
    yield from table(rows)
    if len(told.begins) > _MOST_PHASES:
        yield f"and {len(told.begins) - _MOST_PHASES} more phases"


if __name__ == "__main__":
    sys.exit(main())
