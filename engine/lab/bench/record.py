"""`foredraft bench record --output DIR`: record traces of the engine on built-in texts.

`foredraft replay` reads them. There is one file per kind of text, temperature and number of
requests at a time, and for mixed batches (half predictable, half random). The controller chooses K
half of the time; in between, each K runs for a few steps, so that a replay knows its cost.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tqdm import tqdm

from engine.arguments import Parser, whole
from engine.core import Engine
from engine.lab.bench.offline import Offline, Session
from engine.lab.bench.options import add_pair, clock_of, load, set_threads
from engine.lab.comparison.workload import AUTO, RANDOM, SEED, USUAL, Workload, lanes, pool
from engine.lab.files import new_folder
from engine.messages import Mode

CONCURRENCY = (1, 4, 16)
# Workloads that run together: one kind of text, or half the lanes with a kind and half random.
MIXES = [(Workload(*cell),) for cell in product(USUAL, (0.0, 1.0), CONCURRENCY)] + [
    (Workload(kind, 0.0, count // 2), Workload(RANDOM, 1.0, count // 2))
    for kind, count in product(USUAL, CONCURRENCY)
    if kind != RANDOM and count > 1
]
_STRETCH = 4  # consecutive steps in one mode


def build_parser() -> Parser:
    parser = Parser("foredraft bench record", __doc__)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="a new folder")
    add("--tokens", type=whole(8, 4096), default=192, metavar="N",
        help="of the longest replies (192)")  # fmt: skip
    add_pair(parser)
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Write a trace per workload; return the exit code. Raises EngineError."""
    clock = clock_of(parsed)
    set_threads(parsed.threads)
    pools = {kind: pool(kind) for kind in USUAL}
    with new_folder(parsed.output) as folder:
        config, pair, encode = load(parsed)
        for mix in tqdm(MIXES, unit="trace", leave=False):
            most = sum(workload.concurrency for workload in mix)
            name = "+".join(f"{part.kind}-T{part.temperature:g}" for part in mix)
            speculation = config.speculation.model_copy(
                update={"trace": os.fspath(folder / f"{name}-x{most}.jsonl")}
            )
            player = Offline(
                config.model_copy(update={"speculation": speculation}), pair, encode, [AUTO],
                concurrency=most, prompts=4 * most, reply=parsed.tokens, clock=clock,
            )  # fmt: skip
            parts = (lanes(replace(part, tokens=parsed.tokens), pools, 0) for part in mix)
            session = player.begin(AUTO, [lane for part in parts for lane in part], whole=True)
            drive(player.engines[AUTO][0], session)
    return 0


def drive(engine: Engine, session: Session) -> None:
    """Run a session to its end, a few steps in each mode."""
    session.clock.start()
    for mode in _modes(engine.ready.k_max):
        engine.set_speculation(*mode)
        for _ in range(_STRETCH):
            if session.is_over:
                return
            session.step()


def _modes(k_max: int) -> Iterator[tuple[Mode, int]]:
    """Yield the controller and a fixed K alternately, each K from 0 on once per shuffled pass."""
    rng = random.Random(SEED)
    while True:
        for k in rng.sample(range(k_max + 1), k_max + 1):
            yield "auto", 0
            yield ("fixed", k) if k else ("off", 0)
