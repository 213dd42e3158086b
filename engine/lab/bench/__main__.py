"""`foredraft bench`: modes against each other, on engines in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from engine.arguments import Parser
from engine.child.freeze import freeze_memory
from engine.config import QuantizationName
from engine.lab.bench.offline import Offline
from engine.lab.bench.options import (
    Clock,
    add_clock,
    add_pair,
    clock_name,
    clock_of,
    encoder,
    execute,
    pair_config,
    pair_facts,
    set_threads,
)
from engine.lab.comparison.options import Settings, build_parser, settings
from engine.lab.comparison.race import LONGEST, race, steps
from engine.lab.comparison.report import progress, show
from engine.lab.comparison.result import Comparison
from engine.model.memory import weights_of
from engine.model.pair import load_pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a text differed where it must not; 2 for a mistake."""
    return execute(_parser(), run, arguments)


def _parser() -> Parser:
    parser = build_parser("foredraft bench")
    add_pair(parser)
    parser.add_argument(
        "--quantization", default="none", choices=get_args(QuantizationName),
        help="of the target's linear layers; the draft stays as it is",
    )  # fmt: skip
    add_clock(parser)
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    said, clock = settings(parsed), clock_of(parsed)
    set_threads(parsed.threads)
    return show(compare(parsed, said, clock), json=said.json, plot=said.plot)


def compare(parsed: argparse.Namespace, said: Settings, clock: Clock) -> Comparison:
    """The whole race. Raises EngineError."""
    pair = load_pair(pair_config(parsed, quantization=parsed.quantization))
    most = max(cell.concurrency for cell in said.cells)
    encode = encoder(parsed.target)
    reply = said.size.tokens or LONGEST
    driver = Offline(pair, encode, arms=said.arms, concurrency=most, reply=reply, clock=clock)
    freeze_memory()  # as a server does
    facts = {
        **pair_facts(pair),
        **({} if parsed.quantization == "none" else {"quantization": parsed.quantization}),
        "MB of target weights": round(weights_of(pair.target).size / 1e6),
        "rounds": said.size.rounds,
        "seconds": clock_name(clock),
    }
    comparison = Comparison(facts=facts, arms=said.arms)
    with progress(steps(said.cells, said.arms, said.size)) as notice:
        race(driver, said.cells, said.pools, said.size, comparison, notice=notice)
    return comparison


if __name__ == "__main__":
    sys.exit(main())
