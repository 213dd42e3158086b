"""`python -m engine.lab.replay TRACE` is `foredraft replay`: other policies on what was recorded.

Set `speculation.trace` to a file name to record steps while serving: sizes, times, and whether
guesses were right, but no text. Requests, arrivals and hits are then the same for every policy, so
accepted lengths are exact wherever the guess is known; times are means of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.arguments import Parser, exit_code, number, show, whole
from engine.lab.files import write_json
from engine.lab.picture import check_results
from engine.lab.replay.card import card
from engine.lab.replay.comparison import Comparison, compare
from engine.lab.replay.plots import draw
from engine.lab.replay.policies import ALLOWED, build_policy
from engine.lab.replay.run import MOST_CHARGE
from engine.step.trace import read_trace

_K_MAX = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft replay", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; files are written on the way. Raises EngineError."""
    check_results(parsed.json, parsed.plot, reads=[parsed.trace])
    found = play(parsed)
    if parsed.plot is not None:
        draw(found, parsed.plot)
    if parsed.json is not None:
        write_json(parsed.json, found.as_json())
    return card(found)


def play(parsed: argparse.Namespace) -> Comparison:
    """All policies on the trace. Raises EngineError."""
    trace = read_trace(Path(parsed.trace))
    k_max = max(trace.header.k_max, _K_MAX) if parsed.k_max is None else parsed.k_max
    names = dict.fromkeys(parsed.policy or ["adaptive"])
    policies = [
        (name, partial(build_policy, name, k_max, stops=trace.header.stops)) for name in names
    ]
    for _, build in policies:
        build()
    return compare(trace, policies, k_max=k_max, charge=parsed.charge)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft replay", __doc__)
    parser.add_argument("trace", metavar="TRACE", help="what `speculation.trace` recorded")
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help=f"{ALLOWED}; may be repeated (adaptive)"
    )
    parser.add_argument(
        "--k-max", type=whole(1, 16), metavar="K",
        help=f"largest K (the trace's, at least {_K_MAX})",
    )  # fmt: skip
    parser.add_argument(
        "--charge", type=number(0, MOST_CHARGE), default=1.0, metavar="TIMES",
        help="count a policy's own measured time so many times (1)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE.png", help="draw it (needs foredraft[plots])")
    parser.add_argument("--json", metavar="FILE", help="all figures, for programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
