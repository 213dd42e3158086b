"""`foredraft bench record --output DIR`: traces of the engine on known texts, to be replayed.

`foredraft replay` and `engine.lab.replay.ablate` read them. One file for each kind of text,
temperature and number of requests at a time, and for mixed batches (half predictable, half random).
Requests differ in length and the next one comes when one ends, so that prompts, arrivals and
departures are in it. Half of the time the controller decides; in between every K is played for
some steps, so that a replay knows what each costs here.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.arguments import Parser, whole
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.bench.offline import LONGEST_PROMPT
from engine.lab.bench.options import (
    Clock,
    Encode,
    add_clock,
    add_pair,
    clock_of,
    encoder,
    execute,
    pair_config,
    set_threads,
)
from engine.lab.comparison.grid import KINDS, SEED, Cell, cells, mixed_cells
from engine.lab.comparison.prompts import pool
from engine.lab.files import new_folder
from engine.messages import Mode, SamplingParams, Submit
from engine.model.pair import Pair, load_pair

CONCURRENCY = (1, 4, 16)
TEMPERATURES = (0.0, 1.0)
MOST_TOKENS = 4096
_STRETCH = 4  # steps under one mode
_LEAST_REQUESTS = 10
_WAVES = 2  # requests by requests at a time


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a mistake of the caller."""
    return execute(build_parser(), run, arguments)


def build_parser() -> Parser:
    parser = Parser("foredraft bench record", __doc__)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="a new folder")
    add("--tokens", type=whole(8, MOST_TOKENS), default=192, metavar="N",
        help="of the longest replies (192)")  # fmt: skip
    add("--auto", action="store_true", help="the controller alone decides, as when serving")
    add_pair(parser)
    add_clock(parser)
    return parser


def run(parsed: argparse.Namespace) -> int:
    """The exit code. Raises EngineError."""
    clock = clock_of(parsed)
    set_threads(parsed.threads)
    with new_folder(parsed.output) as folder:
        record_all(parsed, folder, clock)
    return 0


def workloads() -> list[Cell]:
    """Every kind of text, and half of each with random text."""
    grid = cells(KINDS, TEMPERATURES, CONCURRENCY)
    return [*grid, *mixed_cells(KINDS, CONCURRENCY)]


def record_all(parsed: argparse.Namespace, folder: Path, clock: Clock) -> None:
    """A file for each workload. Raises EngineError."""
    pair, encode = load_pair(pair_config(parsed)), encoder(parsed.target)
    chosen = workloads()
    for number, cell in enumerate(chosen, start=1):
        name = _file_name(cell)
        sys.stderr.write(f"{number} of {len(chosen)}: {name}\n")
        requests = list(requests_of(cell, encode, parsed.tokens))
        engine = _engine(pair, folder / name, cell.concurrency, clock)
        drive(engine, requests, cell.concurrency, explore=not parsed.auto)


def requests_of(cell: Cell, encode: Encode, tokens: int) -> Iterator[Submit]:
    """Of a workload, in order; the longest reply has `tokens`, the shortest an eighth of it."""
    rng = random.Random(f"{SEED} {cell.name}")
    prompts = {part.kind: pool(part.kind) for part in cell.parts}
    for number in range(max(_WAVES * cell.concurrency, _LEAST_REQUESTS)):
        part = cell.parts[number % len(cell.parts)]
        text = prompts[part.kind][number % len(prompts[part.kind])]
        params = SamplingParams(
            seed=SEED + number,
            max_tokens=rng.randint(tokens // 8, tokens),
            temperature=part.temperature,
            ignore_eos=True,
        )
        yield Submit(f"{number}", encode(text)[-LONGEST_PROMPT:], params, 0.0)


def _engine(pair: Pair, path: Path, concurrency: int, clock: Clock) -> Engine:
    """One that records."""
    said = {
        "target": {"path": pair.target.path},
        "schedule": {"max_sequences": concurrency},
        "speculation": {"trace": os.fspath(path)},
    }
    return Engine(EngineConfig.model_validate(said), pair=pair, clock=clock)


def drive(engine: Engine, requests: Sequence[Submit], concurrency: int, *, explore: bool) -> None:
    """Serve `requests`, so many at a time. `explore`: with every K in between."""
    left, open_ = list(reversed(requests)), 0
    modes = _modes(engine.ready.k_max)
    steps = 0
    while left or open_:
        while left and open_ < concurrency:
            engine.add(left.pop())
            open_ += 1
        if explore and steps % _STRETCH == 0:
            engine.set_speculation(*next(modes))
        for output in engine.step().items:
            if output.error is not None:
                raise ConfigError(f"the engine refused a request: {output.error}")
            open_ -= output.finish is not None
        steps += 1


def _modes(k_max: int) -> Iterator[tuple[Mode, int]]:
    """In turn the controller and each K from 0 on, shuffled anew each time."""
    rng = random.Random(SEED)
    while True:
        for k in rng.sample(range(k_max + 1), k_max + 1):
            yield "auto", 0
            yield ("fixed", k) if k else ("off", 0)


def _file_name(cell: Cell) -> str:
    """As `code-T0-x16.jsonl`."""
    mix = "+".join(f"{part.kind}-T{part.temperature:g}" for part in cell.parts)
    return f"{mix}-x{cell.concurrency}.jsonl"


if __name__ == "__main__":
    sys.exit(main())
