"""`foretoken bench machine`: what verification and drafting cost here, next to what the memory can
do and to what Leviathan's formula promises.

Prints a card and, as the last line, one JSON object. Exit code 0; 1 if speculation changed a token
of a float32 model; 2 if the pair cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

import torch

from engine.arguments import Parser
from engine.bench.machine.found import KS, card, measure
from engine.bench.seconds import Clock, add_clock, clock_of
from engine.config import BUILTIN, EngineConfig
from engine.errors import ConfigError, EngineError
from engine.pair import Pair, load_pair
from engine.synthetic.on_device import synthetic_pair
from engine.threads import VARIABLES, engine_threads, granted_cores


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parsed = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        _refuse(parsed)
        clock = clock_of(parsed)
        if parsed.threads or VARIABLES[0] not in os.environ:
            torch.set_num_threads(parsed.threads or engine_threads(granted_cores()))
        return run(parsed, clock)
    except EngineError as error:
        print(f"foretoken bench machine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> Parser:
    parser = Parser(
        prog="foretoken bench machine",
        description=__doc__,
    )
    parser.add_argument("--target", default=BUILTIN, help="model folder or hub name")
    parser.add_argument("--draft", default=BUILTIN, help="draft folder or hub name")
    parser.add_argument(
        "--synthetic",
        metavar="SIZE",
        help="instead of folders: a random pair made on the device, `8b` or a number of parameters",
    )
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="of the synthetic pair (0.05 to 0.99)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as the server does")
    add_clock(parser)
    parser.add_argument("--rounds", type=int, default=5, help="of every measurement (1 to 1000)")
    parser.add_argument("--tokens", type=int, default=64, help="of a reply (8 to 1024)")
    parser.add_argument("--prompts", type=int, default=2, help="replies a round (1 to 100)")
    return parser


def _refuse(parsed: argparse.Namespace) -> None:
    """Raises ConfigError."""
    bounds = {"rounds": (1, 1000), "tokens": (8, 1024), "prompts": (1, 100), "threads": (1, 1024)}
    for name, (low, high) in bounds.items():
        given = getattr(parsed, name)
        if given is not None and not low <= given <= high:
            raise ConfigError(f"{name} is {given}; allowed are {low} to {high}")
    if not 0.05 <= parsed.acceptance <= 0.99:
        raise ConfigError(f"acceptance is {parsed.acceptance}; allowed are 0.05 to 0.99")


def run(parsed: argparse.Namespace, clock: Clock) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    model = {"path": parsed.target, "dtype": parsed.dtype}
    proposer = {"path": parsed.draft, "dtype": parsed.dtype}
    config = EngineConfig.model_validate(
        {
            "target": model,
            "device": parsed.device,
            "schedule": {"max_sequences": 1},
            "speculation": {
                "proposer": proposer,
                "controller": {"kind": "fixed", "k": max(KS)},
            },
        }
    )
    pair = _pair(parsed, config)
    found = measure(
        config, pair, rounds=parsed.rounds, prompts=parsed.prompts, tokens=parsed.tokens,
        clock=clock,
    )  # fmt: skip
    print("\n".join(card(found, pair)))
    print(json.dumps(found.as_dict()))
    return 0 if found.equal or not pair.target.exact else 1


def _pair(parsed: argparse.Namespace, config: EngineConfig) -> Pair:
    if parsed.synthetic is None:
        return load_pair(config)
    return synthetic_pair(
        parsed.synthetic,
        acceptance=parsed.acceptance,
        device=config.device,
        dtype=config.target.dtype,
    )


if __name__ == "__main__":
    sys.exit(main())
