"""The command line that both ways of comparing share, and what it means."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from engine.arguments import Parser, lists_of, names_of, number, whole
from engine.errors import ConfigError
from engine.lab.comparison.grid import (
    KINDS,
    RANDOM,
    Arm,
    Cell,
    Size,
    cells,
    mixed_cells,
    parse_arms,
)
from engine.lab.comparison.prompts import FROM_FILE, pool, read_prompts
from engine.lab.picture import check_results

MODES = "off,1,2,3,4,6,auto"
TEMPERATURES = (0.0, 1.0)
AT_ONCE, CORNERS = (1, 4, 16, 32), (1, 32)  # requests; of the small grid
MOST_AT_ONCE = 256
MOST_TOKENS = 4096
MOST_ROUNDS = 1000
MOST_MINUTES = 10_000

DESCRIPTION = """\
Tokens per second of off, fixed K and auto side by side, by kind of text, temperature and number of
requests at a time; whether every mode says the same; the wait for a first token and between tokens.

Offline (the default) it loads the pair and measures the engine in this process. With --url it asks
a running server: a Foredraft is switched between the modes while it serves (needs its admin key),
any other OpenAI-compatible server is measured as it is.

Exit code 1: a text differed among modes where that is promised (`exact`). 2: a mistake.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked command line. `pools`: prompts by kind of text."""

    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    pools: dict[str, list[str]]
    size: Size
    json: str | None
    plot: str | None


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, DESCRIPTION)
    add = parser.add_argument
    add("--modes", default=None, help=f"default {MODES}: off, auto, and fixed Ks")
    add("--kinds", type=names_of(KINDS), default=None, metavar="KIND,KIND,...",
        help=f"of text, default {','.join(KINDS)}")  # fmt: skip
    add("--prompts", metavar="FILE", help="your own prompts instead, one a line, or *.jsonl")
    add("--concurrency", type=lists_of(whole(1, MOST_AT_ONCE)),
        metavar="N,N,...", help="requests at a time (1,4,16,32)")  # fmt: skip
    add("--temperatures", type=lists_of(number(0, 2)), metavar="T,T,...",
        help="default 0,1")  # fmt: skip
    add("--rounds", type=whole(1, MOST_ROUNDS), metavar="N",
        help="of every arm in every cell (3)")  # fmt: skip
    add("--tokens", type=whole(1, MOST_TOKENS), metavar="N",
        help="of each reply; default: as many as --minutes allow")  # fmt: skip
    add("--minutes", type=number(0, MOST_MINUTES, above=True), help="to take, roughly (12)")
    add("--mixed", action="store_true",
        help="instead of the grid: batches half predictable, half random")  # fmt: skip
    add("--quick", action="store_true", help="a small grid: a minute or two")
    add("--json", metavar="FILE", help="write everything that was measured")
    add("--plot", metavar="FILE.png", help="draw it (needs foredraft[plots])")
    return parser


def settings(parsed: argparse.Namespace) -> Settings:
    """Raises ConfigError naming the option, what was given and what is allowed."""
    reads = [] if parsed.prompts is None else [parsed.prompts]
    check_results(parsed.json, parsed.plot, reads=reads)
    _refuse(parsed)
    quick = parsed.quick
    counts = list(dict.fromkeys(parsed.concurrency or (CORNERS if quick else AT_ONCE)))
    size = Size(
        rounds=parsed.rounds or (2 if quick else 3),
        tokens=parsed.tokens,
        minutes=parsed.minutes or (2.0 if quick else 12.0),
    )
    pools, kinds = _pools(parsed)
    if parsed.mixed:
        chosen = mixed_cells(kinds, counts)
        if not chosen:
            raise ConfigError(
                "--mixed needs a kind other than random, and a --concurrency of at least 2"
            )
    else:
        chosen = cells(kinds, list(dict.fromkeys(parsed.temperatures or TEMPERATURES)), counts)
    modes = "off,2,4,auto" if quick else MODES
    used = {part.kind for cell in chosen for part in cell.parts}
    return Settings(
        arms=parse_arms(modes if parsed.modes is None else parsed.modes),
        cells=tuple(chosen),
        pools={kind: pools.get(kind) or pool(kind) for kind in sorted(used)},
        size=size,
        json=parsed.json,
        plot=parsed.plot,
    )


def _refuse(parsed: argparse.Namespace) -> None:
    """Raises ConfigError for what would not be looked at."""
    if parsed.tokens is not None and parsed.minutes is not None:
        raise ConfigError("--minutes says how long replies may be, and --tokens how long they are")
    if parsed.mixed and parsed.temperatures is not None:
        raise ConfigError("--temperatures is for the grid; --mixed has one for each half, 0 and 1")


def _pools(parsed: argparse.Namespace) -> tuple[dict[str, list[str]], list[str]]:
    """Prompts of the user by kind, and the kinds of the grid."""
    if parsed.prompts is None:
        usual = ("code",) if parsed.mixed else ("code", RANDOM) if parsed.quick else KINDS
        return {}, list(parsed.kinds or usual)
    if parsed.kinds is not None:
        raise ConfigError("--kinds is for the built-in prompts, and --prompts names others")
    return {FROM_FILE: read_prompts(parsed.prompts)}, [FROM_FILE]
