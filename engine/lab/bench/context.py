"""`foredraft bench context`: what a long context costs one stream, and what a cached prefix saves.

Decodes without guesses after prompts of growing length, fits a line to the time between tokens, and
sets its slope against the KV bytes of a token and what a copy moves. Exit code 0; 2 if the model
cannot be loaded or is asked for more than it has.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from statistics import linear_regression, median
from typing import get_args

from engine.arguments import Parser, whole
from engine.config import AttentionName, EngineConfig
from engine.errors import ConfigError
from engine.lab.bench.costs import copier
from engine.lab.bench.offline import Offline
from engine.lab.bench.options import add_target, pair_facts, set_threads
from engine.lab.comparison.figures import Comparison
from engine.lab.comparison.race import Race
from engine.lab.comparison.report import show
from engine.lab.comparison.workload import OFF, Workload
from engine.lab.picture import check_results
from engine.model.kv_cache import bytes_per_token
from engine.model.pair import load_pair

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def build_parser() -> Parser:
    parser = Parser("foredraft bench context", __doc__)
    add_target(parser)
    add = parser.add_argument
    add("--attention", choices=get_args(AttentionName), default="auto",
        help="as the configuration's `attention`")  # fmt: skip
    add("--longest", type=whole(64, 1 << 20), metavar="N",
        help="prompt; default: what the model has room for")  # fmt: skip
    add("--rounds", type=whole(1, 100), default=3, metavar="N", help="over all lengths (3)")
    add("--tokens", type=whole(2, 256), default=16, metavar="N", help="decoded each time (16)")
    add("--json", metavar="FILE", help="write everything that was measured")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    check_results(parsed.json, None)
    set_threads(parsed.threads)
    config = EngineConfig.model_validate(
        {
            "target": {"path": parsed.target, "dtype": parsed.dtype},
            "device": parsed.device,
            "attention": parsed.attention,
            "speculation": {"proposer": {"kind": "none"}},
        }
    )
    pair = load_pair(config)
    room = pair.target.max_model_len - parsed.tokens
    longest = parsed.longest or room
    if longest > room:
        raise ConfigError(f"longest is {longest}, but the model has room for {room}")
    lengths = [length for length in LENGTHS if length < longest - longest // 8] + [longest]
    text = random.Random(0).choices(range(8, pair.target.vocab_size), k=longest)
    # A prompt is named by its length.
    player = Offline(
        config, pair, lambda name: text[: int(name)], [OFF],
        concurrency=1, prompts=len(lengths), longest_prompt=longest, reply=parsed.tokens,
    )  # fmt: skip
    race = Race(
        (OFF,),
        [Workload(f"{length} tokens of context", 0.0, 1, parsed.tokens) for length in lengths],
        {f"{length} tokens of context": [str(length)] for length in lengths},
        rounds=parsed.rounds,
    )
    comparison = race.run(player)
    copy = copier(pair.target.device, time.perf_counter)
    copied = median(copy() for _ in range(parsed.rounds + 1))
    token_bytes = bytes_per_token(pair.target.layers, pair.target.dtype)
    facts = {**pair_facts(pair, time.perf_counter), "KV bytes of a token": token_bytes}
    engine, _ = player.engines[OFF]
    facts |= {"attention": engine.ready.attention, "bytes/s of a copy": round(copied)}
    code = show("Foredraft bench context", facts, comparison, json=parsed.json)
    print("\n".join(card(comparison, lengths, token_bytes, copied)))
    return code


def line(points: dict[int, float]) -> tuple[float, float]:
    """Least squares: the value at 0 and the slope; flat through a single point."""
    if len(points) == 1:
        return next(iter(points.values())), 0.0
    slope, base = linear_regression(list(points), list(points.values()))
    return base, slope


def card(
    comparison: Comparison, lengths: list[int], token_bytes: int, copied: float
) -> Iterator[str]:
    """What follows of the table."""
    steps = {
        length: median(run.between or 0.0 for run in cell.rounds[OFF])
        for length, cell in zip(lengths, comparison.cells, strict=True)
    }
    base, slope = line(steps)
    worst = max(abs(base + slope * n - t) / t for n, t in steps.items())
    yield (
        f"line: {base * 1e3:.2f} ms + {slope * 1e6:.3f} ms for every 1000 tokens; "
        f"no step is farther from it than {100 * worst:.0f} %"
    )
    if slope > 0:
        rate = token_bytes / slope
        yield (
            f"a token's keys and values are {token_bytes} bytes: {rate / 1e9:.1f} GB/s; a "
            f"copy moves {copied / 1e9:.1f} GB/s ({rate / copied:.2f} of it)"
        )
    longest = comparison.cells[-1]
    fresh, cached = longest.first_tokens[OFF][0], median(r.first for r in longest.rounds[OFF])
    yield (
        f"first token of {lengths[-1]}: {fresh:.2f} s fresh, {cached * 1e3:.1f} ms from the prefix"
        f" cache: {fresh / cached:.0f}x shorter"
    )
