"""`foredraft bench context`: what a long context costs one stream, and what a cached prefix saves.

Decodes after prompts of growing length, in rounds; fits a line to the step times, and sets its
slope against the KV bytes of a token and what a copy moves. Then the time to the first token of the
longest prompt, fresh and once more. Exit code 0; 2 if the model cannot be loaded or is asked for
more than it has.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from statistics import linear_regression, median
from typing import get_args

import torch

from engine.arguments import Parser, number, whole
from engine.config import AttentionName, EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.bench.costs import Copy
from engine.lab.bench.offline import EngineSession, TurnClock
from engine.lab.bench.options import add_target, set_threads
from engine.lab.files import write_json
from engine.lab.picture import check_results
from engine.messages import SamplingParams, Submit
from engine.model.kv_cache import bytes_per_token
from engine.model.pair import load_pair

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds. `steps[length]`: the median step after a prompt of so many tokens, `base + slope *
    length` the line through them. `copy`: bytes a second that a copy reads and writes. `first`,
    `second`: to the first token of the longest prompt, fresh and from the prefix cache."""

    steps: dict[int, float]
    base: float
    slope: float
    copy: float
    first: float
    second: float


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
    add("--memory-gib", type=number(1e-3, 1 << 14), default=4.0, help="KV cache on a CPU (4)")
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
            "cache": {"cpu_memory_gib": parsed.memory_gib},
            "schedule": {"max_sequences": 1},
            "speculation": {"proposer": {"kind": "none"}},
        }
    )
    pair = load_pair(config)
    room = pair.target.max_model_len - parsed.tokens
    longest = parsed.longest or room
    if longest > room:
        raise ConfigError(f"longest is {longest}, but the model has room for {room}")
    clock = TurnClock()
    engine = Engine(config, pair=pair, clock=clock)
    found = measure(engine, clock, longest, rounds=parsed.rounds, tokens=parsed.tokens)
    ready, token_bytes = engine.ready, bytes_per_token(pair.target.layers, pair.target.dtype)
    print(
        f"{parsed.target}, {ready.dtype} on {ready.device}, attention {ready.attention}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; {parsed.rounds} rounds"
    )
    print("\n".join(card(found, token_bytes)))
    if parsed.json is not None:
        facts = {"attention": ready.attention, "token_bytes": token_bytes}
        write_json(parsed.json, {**facts, **asdict(found)})
    return 0


def measure(engine: Engine, clock: TurnClock, longest: int, *, rounds: int, tokens: int) -> Found:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(8, engine.ready.vocab_size, (longest,), generator=generator).tolist()
    names = count()

    def decode(length: int, salt: str = "") -> list[float]:
        """Seconds to each delivery."""
        params = SamplingParams(
            seed=0, temperature=0.0, max_tokens=tokens, ignore_eos=True, cache_salt=salt
        )
        submit = Submit(f"context-{next(names)}", text[:length], params, 0.0)
        session = EngineSession(engine, clock, [[submit]])
        session.play(math.inf)
        return [at for at, _ in session.run.replies[0].arrivals]

    decode(64, "another")  # whatever happens once
    first = decode(longest)[0]
    lengths = [length for length in LENGTHS if length < longest - longest // 8] + [longest]
    steps: dict[int, list[float]] = {length: [] for length in lengths}
    copy, copies, waits = Copy(torch.device(engine.ready.device)), list[float](), list[float]()
    for _ in range(rounds):
        for length in lengths:
            arrivals = decode(length)
            steps[length] += [after - before for before, after in pairwise(arrivals)]
        waits.append(arrivals[0])
        copies.append(copy.seconds(time.perf_counter))
    middle = {length: median(times) for length, times in steps.items()}
    return Found(middle, *line(middle), copy.bytes / median(copies), first, median(waits))


def line(points: dict[int, float]) -> tuple[float, float]:
    """Least squares: the value at 0 and the slope; flat through a single point."""
    if len(points) == 1:
        return next(iter(points.values())), 0.0
    slope, base = linear_regression(list(points), list(points.values()))
    return base, slope


def card(found: Found, token_bytes: int) -> Iterator[str]:
    """The page for people."""
    base, slope = found.base, found.slope
    for length, seconds in found.steps.items():
        yield f"{length:>8} tokens of context: {seconds * 1e3:8.2f} ms a step"
    worst = max(abs(base + slope * n - t) / t for n, t in found.steps.items())
    yield (
        f"line: {base * 1e3:.2f} ms + {slope * 1e6:.3f} ms for every 1000 tokens; "
        f"no step is farther from it than {100 * worst:.0f} %"
    )
    if slope > 0:
        rate = token_bytes / slope
        yield (
            f"a token's keys and values are {token_bytes} bytes: {rate / 1e9:.1f} GB/s; a "
            f"copy moves {found.copy / 1e9:.1f} GB/s ({rate / found.copy:.2f} of it)"
        )
    yield (
        f"first token of {max(found.steps)}: {found.first:.2f} s fresh, {found.second * 1e3:.1f} "
        f"ms from the prefix cache: {found.first / found.second:.0f}x shorter"
    )
