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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from engine.arguments import Parser
from engine.bench.machine.costs import CONTEXT, Costs, measure_costs, now
from engine.bench.machine.formula import leviathan, with_verification
from engine.bench.machine.speed import Speed, measure_speeds
from engine.config import BUILTIN, EngineConfig
from engine.core import Engine
from engine.errors import ConfigError, EngineError
from engine.pair import Pair, load_pair
from engine.synthetic.on_device import synthetic_pair
from engine.threads import VARIABLES, engine_threads, granted_cores

KS = (1, 2, 3, 5, 7)
TEMPERATURES = (0.0, 1.0)
PROMPT = 32  # tokens, the same pseudo-random ones every time


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parsed = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        _refuse(parsed)
        if parsed.threads or VARIABLES[0] not in os.environ:
            torch.set_num_threads(parsed.threads or engine_threads(granted_cores()))
        return run(parsed)
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


def run(parsed: argparse.Namespace) -> int:
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
    costs = measure_costs(config, pair, rounds=parsed.rounds, clock=now)
    engine = Engine(config, pair=pair)
    speeds: list[Speed] = []
    equal = True
    for temperature in TEMPERATURES:
        found, same = measure_speeds(
            engine, _prompts(pair, parsed.prompts), ks=KS, temperature=temperature,
            tokens=parsed.tokens, rounds=parsed.rounds, clock=now,
        )  # fmt: skip
        speeds += found
        equal &= same
    print("\n".join(card(parsed, pair, costs, speeds, equal)))
    print(json.dumps({"costs": asdict(costs), "speeds": rows_of(costs, speeds), "equal": equal}))
    return 0 if equal or not pair.target.exact else 1


def _pair(parsed: argparse.Namespace, config: EngineConfig) -> Pair:
    if parsed.synthetic is None:
        return load_pair(config)
    return synthetic_pair(
        parsed.synthetic,
        acceptance=parsed.acceptance,
        device=config.device,
        dtype=config.target.dtype,
    )


def _prompts(pair: Pair, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, pair.target.vocab_size, (count, PROMPT), generator=generator)
    prompts: list[list[int]] = ids.tolist()
    return prompts


def rows_of(costs: Costs, speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    """Each speed with what the formula says, and the shares of it that were reached."""
    rows = []
    for speed in speeds:
        a, k, c = speed.acceptance, speed.k, costs.draft_ratio
        promised, possible = leviathan(a, k, c), with_verification(a, k, c, costs.ratios[k])
        rows.append(
            {
                **asdict(speed),
                "leviathan": promised,
                "efficiency": speed.speedup / promised,
                "with_verification": possible,
                "of_costs": speed.speedup / possible,
            }
        )
    return rows


def card(
    parsed: argparse.Namespace, pair: Pair, costs: Costs, speeds: Sequence[Speed], equal: bool
) -> Iterator[str]:
    """The page for people."""
    draft = pair.draft.path if pair.draft else "no draft"
    yield (
        f"{pair.target.path} with {draft}, {pair.target.dtype_name} on "
        f"{pair.target.device_name}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"medians of {parsed.rounds} rounds"
    )
    yield (
        f"one row after {CONTEXT} tokens: {costs.rows[0] * 1e3:.2f} ms, "
        f"{costs.weight_bytes / 1e6:.0f} MB of weights: {costs.read / 1e9:.1f} GB/s read; "
        f"a copy moves {costs.copy / 1e9:.1f} GB/s ({costs.read / costs.copy:.2f} of it)"
    )
    if costs.draft is not None:
        yield (
            f"a draft step right after a target step: {costs.draft * 1e3:.2f} ms, "
            f"{costs.draft_ratio:.3f} of a target step"
        )
    yield "verification, t(K+1 rows) / t(1 row):"
    for first in (1, 9):
        yield "  " + "  ".join(f"K={k} {costs.ratios[k]:.2f}" for k in range(first, first + 8))
    yield (
        f"{'':<12}{'tokens/s':>9}{'of K=0':>8}{'accept':>8}{'tok/rnd':>9}{'Leviathan':>11}"
        f"{'reached':>9}{'costs say':>11}{'reached':>9}"
    )
    for row in rows_of(costs, speeds):
        yield (
            f"T={row['temperature']:g} K={row['k']:<6}{row['rate']:>9.1f}{row['speedup']:>7.2f}x"
            f"{row['acceptance']:>8.2f}{row['tokens_per_round']:>9.2f}{row['leviathan']:>10.2f}x"
            f"{row['efficiency']:>9.2f}{row['with_verification']:>10.2f}x{row['of_costs']:>9.2f}"
        )
    yield f"texts of all K equal: {'yes' if equal else 'no'}"


if __name__ == "__main__":
    sys.exit(main())
