"""`foredraft bench machine`: what verification and drafting cost here, next to what the memory can
do and to what Leviathan's formula promises.

Prints a card and, as the last line, one JSON object. Exit code 0; 1 if speculation changed a token
of a float32 model; 2 if the pair cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from engine.arguments import Parser, exit_code, number, whole
from engine.config import BUILTIN, EngineConfig
from engine.errors import ConfigError
from engine.lab.bench.machine.found import KS, card, measure
from engine.lab.bench.options import add_pair, pair_config, set_threads
from engine.lab.bench.seconds import add_clock, clock_of
from engine.lab.synthetic.on_device import synthetic_pair
from engine.model.pair import Pair, load_pair


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parsed = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return exit_code("foredraft bench machine", lambda: run(parsed))


def build_parser() -> Parser:
    parser = Parser("foredraft bench machine", __doc__)
    add_pair(parser)
    add = parser.add_argument
    add("--synthetic", metavar="SIZE",
        help="instead of folders: a random pair made on the device, `8b` or a number of"
        " parameters")  # fmt: skip
    add("--acceptance", type=number(0.05, 0.99), help="of the synthetic pair (0.8)")
    add_clock(parser)
    add("--rounds", type=whole(1, 1000), default=5, metavar="N", help="of every measurement (5)")
    # The first step may give as many as the largest K and one, and its time is not counted.
    add("--tokens", type=whole(max(KS) + 2, 1024), default=64, metavar="N", help="of a reply (64)")
    add("--prompts", type=whole(1, 100), default=2, metavar="N", help="replies a round (2)")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    _refuse(parsed)
    clock = clock_of(parsed)
    set_threads(parsed.threads)
    fixed = {"kind": "fixed", "k": max(KS)}
    config = pair_config(parsed, controller=fixed, schedule={"max_sequences": 1})
    pair = _pair(parsed, config)
    found = measure(
        config, pair, rounds=parsed.rounds, prompts=parsed.prompts, tokens=parsed.tokens,
        clock=clock,
    )  # fmt: skip
    print("\n".join(card(found, pair)))
    print(json.dumps(found.as_dict()))
    return 0 if found.equal or not pair.target.exact else 1


def _refuse(parsed: argparse.Namespace) -> None:
    """Raises ConfigError for what would not be looked at."""
    if parsed.synthetic is None and parsed.acceptance is not None:
        raise ConfigError("--acceptance is of the pair that --synthetic makes; folders have theirs")
    folders = {"--target": parsed.target, "--draft": parsed.draft}
    named = [option for option, name in folders.items() if name != BUILTIN]
    if parsed.synthetic is not None and named:
        raise ConfigError(f"{named[0]} names a folder, and --synthetic makes a pair instead")


def _pair(parsed: argparse.Namespace, config: EngineConfig) -> Pair:
    if parsed.synthetic is None:
        return load_pair(config)
    acceptance = 0.8 if parsed.acceptance is None else parsed.acceptance
    return synthetic_pair(parsed.synthetic, acceptance=acceptance, config=config)


if __name__ == "__main__":
    sys.exit(main())
