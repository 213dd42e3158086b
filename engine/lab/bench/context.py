"""`foredraft bench context`: what a long context costs one stream, and what a cached prefix saves.

Decodes after prompts of growing length, in rounds; fits a line to the step times, and sets its
slope against the KV bytes of a token and what a copy moves. Then the time to the first token of the
longest prompt, fresh and once more. Prints a card and, as the last line, one JSON object. Exit code
0; 2 if the model cannot be loaded or is asked for more than it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median
from typing import Any, get_args

import torch

from engine.arguments import Parser, number, whole
from engine.config import AttentionName, EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.bench.machine import Copy
from engine.lab.bench.options import add_target, execute, set_threads
from engine.lab.bench.turns import Played, Totals, play
from engine.messages import SamplingParams, Submit
from engine.model.kv_cache import bytes_per_token
from engine.model.pair import load_pair

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds and bytes. `steps[length]`: the median step after a prompt of so many tokens. The
    line: `base + slope * tokens`; `worst` is its largest distance, as a share of the step. `first`
    and `second`: to the first token of the longest prompt, `cached` tokens of the second's found in
    the prefix cache. `copy`: bytes a second that a copy reads and writes."""

    steps: dict[int, float]
    base: float
    slope: float
    worst: float
    token_bytes: int
    copy: float
    first: float
    second: float
    cached: int


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return execute(build_parser(), run, arguments)


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
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    set_threads(parsed.threads)
    engine, found = measure(parsed)
    print("\n".join(card(parsed, engine, found)))
    print(json.dumps({"attention": engine.ready.attention, **asdict(found)}))
    return 0


def measure(parsed: argparse.Namespace) -> tuple[Engine, Found]:
    """Raises EngineError."""
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
    lengths = [length for length in LENGTHS if length < longest - longest // 8] + [longest]
    engine = Engine(config, pair=pair)
    generator = torch.Generator().manual_seed(0)
    text: list[int] = torch.randint(
        8, pair.target.vocab_size, (longest,), generator=generator
    ).tolist()
    _decode(engine, text[:64], 2, "another")  # whatever happens once
    first = _decode(engine, text, parsed.tokens).first
    steps: dict[int, list[float]] = {length: [] for length in lengths}
    copy, again = Copy(pair.target.device), Played([])
    waits, copies = list[float](), list[float]()
    for _ in range(parsed.rounds):
        for length in lengths:
            again = _decode(engine, text[:length], parsed.tokens)
            steps[length] += again.steps
        waits.append(again.first)
        copies.append(copy.seconds(time.perf_counter))
    middle = {length: median(times) for length, times in steps.items()}
    base, slope = line(middle)
    return engine, Found(
        steps=middle,
        base=base,
        slope=slope,
        worst=max(abs(base + slope * n - t) / t for n, t in middle.items()),
        token_bytes=bytes_per_token(pair.target.layers, pair.target.dtype),
        copy=copy.bytes / median(copies),
        first=first,
        second=median(waits),
        cached=again.cached,
    )


def _decode(engine: Engine, prompt: list[int], tokens: int, salt: str = "") -> Played:
    params = SamplingParams(
        seed=0, temperature=0.0, max_tokens=tokens, ignore_eos=True, cache_salt=salt
    )
    return play(engine, [Submit("context", prompt, params, 0.0)], time.perf_counter, Totals())


def line(points: dict[int, float]) -> tuple[float, float]:
    """Least squares: the value at 0 and the slope; flat through a single point."""
    if len(points) == 1:
        return next(iter(points.values())), 0.0
    slope, base = linear_regression(list(points), list(points.values()))
    return base, slope


def card(parsed: argparse.Namespace, engine: Engine, found: Found) -> Iterator[str]:
    """The page for people."""
    ready: Any = engine.ready
    yield (
        f"{parsed.target}, {ready.dtype} on {ready.device}, attention {ready.attention}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; {parsed.rounds} rounds"
    )
    for length, seconds in found.steps.items():
        yield f"{length:>8} tokens of context: {seconds * 1e3:8.2f} ms a step"
    yield (
        f"line: {found.base * 1e3:.2f} ms + {found.slope * 1e6:.3f} ms for every 1000 tokens; "
        f"no step is farther from it than {100 * found.worst:.0f} %"
    )
    if found.slope > 0:
        rate = found.token_bytes / found.slope
        yield (
            f"a token's keys and values are {found.token_bytes} bytes: {rate / 1e9:.1f} GB/s; a "
            f"copy moves {found.copy / 1e9:.1f} GB/s ({rate / found.copy:.2f} of it)"
        )
    yield (
        f"first token of {max(found.steps)}: {found.first:.2f} s fresh, {found.second * 1e3:.1f} "
        f"ms with {found.cached} of them cached: {found.first / found.second:.0f}x shorter"
    )


if __name__ == "__main__":
    sys.exit(main())
