"""The command line shared by all comparisons, and its conversion to a Race."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from engine.arguments import Parser, lists_of, names_of, number, whole
from engine.errors import ConfigError
from engine.lab.comparison.prompt_files import read_texts
from engine.lab.comparison.race import Race
from engine.lab.comparison.workload import (
    FROM_FILE,
    KINDS,
    POOL,
    RANDOM,
    TEMPLATES,
    USUAL,
    Pools,
    Workload,
    apart,
    parse_arms,
    pool,
)
from engine.lab.files import writable

DESCRIPTION = """\
Tokens per second of off, fixed K and auto side by side, by kind of text, temperature and number of
requests at a time; whether all modes give equal texts; time to first token and between tokens.

Offline (the default) on engines in this process, and beside them the modes transformers, assisted
and assisted-4: transformers' own generation. Each of these has a --help of its own:

  bench suite      code, with transformers, and what forwards cost; all options below
  bench machine    what forwards cost, by rows; all options below
  bench host       the time of a step outside forwards, by its parts; all options below
  bench proposers  every proposer, alone and with K chosen live, against off and auto; the same
  bench record     traces for replay: --output DIR, --tokens, and pair, device and timing as below
  bench front      the front end alone: --streams, --rate, --seconds, --tokens, --tokens-per-step,
                   --scenes, --json
  bench --url URL  a running server; a Foredraft is switched while it serves, any other is measured
                   as it is: --model, --api-key, --admin-key, --against NAME=URL; no pair, no device

Exit code 1: a text differed among modes where that is promised (`exact`). 2: invalid arguments.
"""


@dataclass(frozen=True, slots=True)
class Preset:
    """Default workloads, for options that the command line leaves out."""

    modes: str
    kinds: tuple[str, ...] = USUAL
    temperatures: tuple[float, ...] = (0.0, 1.0)
    concurrency: tuple[int, ...] = (1, 4, 16, 32)
    rounds: int = 3
    minutes: float = 12.0
    together: bool = False


GRID = Preset("off,1,2,3,4,6,auto")
QUICK = Preset("off,2,4,auto", ("code", RANDOM), concurrency=(1, 32), rounds=2, minutes=2.0)


def build_parser(prog: str, usual: Preset = GRID) -> Parser:
    parser = Parser(prog, DESCRIPTION)
    add = parser.add_argument
    add("--modes", help=f"default {usual.modes}: off, auto, fixed Ks, proposers")
    add("--kinds", type=names_of(KINDS), metavar="KIND,KIND,...",
        help=f"of text: {', '.join(KINDS)}; default {','.join(usual.kinds)}")  # fmt: skip
    add("--prompts", metavar="FILE", help="your own prompts instead")
    add("--concurrency", type=lists_of(whole(1, 256)), metavar="N,N,...",
        help=f"requests at a time ({','.join(map(str, usual.concurrency))})")  # fmt: skip
    add("--temperatures", type=lists_of(number(0, 2)), metavar="T,T,...", help="default 0,1")
    add("--rounds", type=whole(1, 1000), metavar="N",
        help=f"of every arm in every cell ({usual.rounds})")  # fmt: skip
    add("--tokens", type=whole(1, 4096), metavar="N",
        help="of each reply; default: as many as --minutes allow")  # fmt: skip
    add("--ends", action="store_true",
        help="replies end where the model ends them, after --tokens at the latest")  # fmt: skip
    add(
        "--minutes",
        type=number(0, 10_000, above=True),
        help=f"to take, roughly ({usual.minutes:g})",
    )
    add("--quick", action="store_true", help="a small grid: a minute or two")
    add("--json", metavar="FILE", help="write everything that was measured")
    return parser


def settings(
    parsed: argparse.Namespace,
    usual: Preset = GRID,
    quick: Preset = QUICK,
    others: Sequence[str] = (),
    variants: Sequence[str] = (),
) -> Race:
    """Return the race of a command line. `others`, `variants`: further names for --modes. Raises
    ConfigError naming the option, its value and the allowed values."""
    writable({"--json": parsed.json}, reads=[parsed.prompts] if parsed.prompts else [])
    if parsed.tokens is not None and parsed.minutes is not None and not parsed.ends:
        raise ConfigError("--minutes says how long replies may be, and --tokens how long they are")
    if parsed.prompts is not None and parsed.kinds is not None:
        raise ConfigError("--kinds is for the built-in prompts, and --prompts names others")
    preset = quick if parsed.quick else usual
    given: Pools = {} if parsed.prompts is None else {FROM_FILE: read_texts(parsed.prompts)}
    kinds = given or parsed.kinds or preset.kinds
    # Cells of one kind are adjacent, because they share prompts.
    grid = product(
        kinds,
        dict.fromkeys(parsed.temperatures or preset.temperatures),
        dict.fromkeys(parsed.concurrency or preset.concurrency),
    )
    rounds = parsed.rounds or preset.rounds
    workloads = apart(
        [Workload(*cell, parsed.tokens or 0, parsed.ends, preset.together) for cell in grid], rounds
    )
    most = max(workload.first + workload.requests(rounds) for workload in workloads)
    return Race(
        arms=parse_arms(preset.modes if parsed.modes is None else parsed.modes, others, variants),
        workloads=workloads,
        pools=given or {kind: pool(kind, most if kind == TEMPLATES else POOL) for kind in kinds},
        rounds=rounds,
        minutes=parsed.minutes or preset.minutes,
    )
