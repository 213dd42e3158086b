"""`foredraft bench machine`: what verification and drafting cost here, next to what the memory can
do and to what Leviathan's formula promises.

Prints a card and, as the last line, one JSON object. Exit code 0; 1 if speculation changed a token
of a float32 model; 2 if the pair cannot be loaded.

Leviathan et al. (arXiv:2211.17192): with acceptance a at each position and a draft step of c
target steps, k guesses give (1 - a^(k+1)) / (1 - a) tokens a round, and the round takes k c + 1
target steps, as if verifying k + 1 rows took as long as one. `with_verification` charges what it
does take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from engine.arguments import Parser, number, whole
from engine.config import BUILTIN, EngineConfig
from engine.core import Engine
from engine.cpu.fused import FusedDecoder
from engine.errors import ConfigError
from engine.lab.bench.options import (
    Clock,
    add_clock,
    add_pair,
    clock_of,
    execute,
    pair_config,
    pair_facts,
    set_threads,
)
from engine.lab.bench.turns import EngineContender, Entrant, Row, Task, race
from engine.lab.comparison.report import heading, table
from engine.lab.synthetic.on_device import synthetic_pair
from engine.messages import Mode
from engine.model.kv_cache import bytes_per_token
from engine.model.loaded import LoadedModel
from engine.model.pair import Pair, build_cache, load_pair, runner_of
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment

KS = (1, 2, 3, 5, 7)
TEMPERATURES = (0.0, 1.0)
PROMPT = 32  # tokens, the same pseudo-random ones every time
CONTEXT = 256  # tokens before the timed rows
MOST_GUESSES = 16
COPIED = 1 << 26  # float32 numbers: more than any cache holds
SETTLING = 4  # forwards until a small model is in the caches again, which a copy drove it out of


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return execute(build_parser(), run, arguments)


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
    folders = {"--target": parsed.target, "--draft": parsed.draft}
    named = [option for option, name in folders.items() if name != BUILTIN]
    if parsed.synthetic is None and parsed.acceptance is not None:
        raise ConfigError("--acceptance is of the pair that --synthetic makes; folders have theirs")
    if parsed.synthetic is not None and named:
        raise ConfigError(f"{named[0]} names a folder, and --synthetic makes a pair instead")
    clock = clock_of(parsed)
    set_threads(parsed.threads)
    fixed = {"kind": "fixed", "k": max(KS)}
    config = pair_config(parsed, controller=fixed, schedule={"max_sequences": 1})
    if parsed.synthetic is None:
        pair = load_pair(config)
    else:
        acceptance = 0.8 if parsed.acceptance is None else parsed.acceptance
        pair = synthetic_pair(parsed.synthetic, acceptance=acceptance, config=config)
    sizes = {"rounds": parsed.rounds, "prompts": parsed.prompts, "tokens": parsed.tokens}
    found = measure(config, pair, clock=clock, **sizes)
    print("\n".join(card(found, pair)))
    print(json.dumps(found.as_dict()))
    return 0 if found.equal or not pair.target.exact else 1


@dataclass(frozen=True, slots=True)
class Costs:
    """`rows[i]`: seconds of a target forward of i + 1 rows, `ratios[i]` of them to one row.
    `draft`: seconds of a draft step after a target forward, None without a draft. Bandwidths in
    bytes a second: `copy` reads and writes, `read` what a forward of one row must read."""

    rows: list[float]
    ratios: list[float]
    draft: float | None
    draft_ratio: float
    copy: float
    read: float
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """`speeds`: decoding alone at batch 1, of K = 0 and of KS; `rounds`: of every measurement."""

    costs: Costs
    speeds: list[Row]
    rounds: int

    @property
    def equal(self) -> bool:
        """Whether all K said the same."""
        return all(row.equal == row.compared for row in self.speeds)

    def as_dict(self) -> dict[str, Any]:
        rows = list(rows_of(self.costs, self.speeds))
        return {"costs": asdict(self.costs), "speeds": rows, "equal": self.equal}


def measure(
    config: EngineConfig, pair: Pair, *, rounds: int, prompts: int, tokens: int, clock: Clock
) -> Found:
    """`prompts` replies of so many `tokens`. The config allows the largest of KS. Raises
    EngineError."""
    costs = measure_costs(config, pair, rounds=rounds, clock=clock)
    engine = Engine(config, pair=pair, clock=clock)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, pair.target.vocab_size, (prompts, PROMPT), generator=generator)
    tasks = [Task([prompt]) for prompt in ids.tolist()]
    entrants = []
    for k in (0, *KS):
        mode: tuple[Mode, int] = ("fixed", k) if k else ("off", 0)
        contender = EngineContender(engine, tokens=tokens, clock=clock, mode=mode)
        entrants.append(Entrant(f"K={k}", contender, tasks))
    speeds = race("", entrants, temperatures=TEMPERATURES, rounds=rounds, decoding=True)
    return Found(costs, speeds, rounds)


def measure_costs(config: EngineConfig, pair: Pair, *, rounds: int, clock: Clock) -> Costs:
    """Each thing once a round; ratios are medians of ratios within a round. Raises MemoryPlanError
    where the cache cannot hold `CONTEXT` tokens."""
    cache, plan = build_cache(config, pair)
    longest = min(CONTEXT + MOST_GUESSES + 1, plan.blocks * cache.block_size)
    longest = min(longest, pair.target.max_model_len)
    start = longest - MOST_GUESSES - 1
    table = list(range(-(-longest // cache.block_size)))
    target = runner_of(config, pair.target, cache, clock)
    draft = runner_of(config, pair.draft, cache, clock) if pair.draft else None
    copy = Copy(pair.target.device)
    found: list[list[float]] = []  # rows 1 to MOST_GUESSES + 1, a draft step, a copy
    for _ in range(rounds + 1):
        for _ in range(SETTLING):
            _forward(target, Segment([0], start, table, 1))
        counts = range(1, MOST_GUESSES + 2)
        seconds = [_forward(target, Segment([0] * n, start, table, n)) for n in counts]
        seconds.append(_forward(draft, Segment([0], start, table, 1)) if draft else 0.0)
        found.append([*seconds, copy.seconds(clock)])
    found = found[1:]  # the first one is warm-up
    *rows, drafted, copied = (median(column) for column in zip(*found, strict=True))
    shares = [[second / round_[0] for second in round_] for round_ in found]
    *ratios, draft_ratio, _ = (median(column) for column in zip(*shares, strict=True))
    weights = weight_bytes(pair.target)
    read = weights + start * bytes_per_token(pair.target.layers, pair.target.dtype)
    return Costs(
        rows=rows,
        ratios=ratios,
        draft=drafted if draft is not None else None,
        draft_ratio=draft_ratio,
        copy=copy.bytes / copied,
        read=read / rows[0],
        weight_bytes=weights,
    )


def _forward(runner: ModelRunner, segment: Segment) -> float:
    runner.forward([segment])
    runner.wait()
    return runner.seconds


class Copy:
    """From memory to memory: how fast bytes can be moved."""

    def __init__(self, device: torch.device) -> None:
        self._source = torch.ones(COPIED, device=device)
        self._sink = torch.empty_like(self._source)
        self.bytes = 2 * self._source.nbytes  # read and written

    def seconds(self, clock: Clock) -> float:
        """Of one copy."""
        started = clock()
        self._sink.copy_(self._source)
        if self._source.device.type == "cuda":
            torch.cuda.synchronize(self._source.device)
        return clock() - started


def weight_bytes(model: LoadedModel) -> int:
    """What a forward of one row reads of the weights, in the size in which they are held for few
    rows: all but the embedding, if the output has weights of its own."""
    if model.compiled is not None:
        return model.compiled.packed_bytes
    if isinstance(model.logits, FusedDecoder) and model.logits.packed_bytes:
        return model.logits.packed_bytes
    head = model.model.get_output_embeddings().weight
    embedding = model.model.get_input_embeddings().weight
    numbers = sum(p.numel() for p in model.model.parameters())
    numbers -= embedding.numel() * (head.data_ptr() != embedding.data_ptr())
    return int(numbers * model.dtype.itemsize)


def tokens_per_round(acceptance: float, k: int) -> float:
    """Expected tokens of a round of k guesses, the target's own included."""
    return sum(acceptance**i for i in range(k + 1))


def with_verification(
    acceptance: float, k: int, draft_cost: float, verification: float = 1.0
) -> float:
    """Speed-up over plain decoding; Leviathan's where `verification` is 1. `draft_cost`: a draft
    step, `verification`: a target step of k + 1 rows, both in target steps of one row."""
    return tokens_per_round(acceptance, k) / (k * draft_cost + verification)


def acceptance_of(proposed_at: Sequence[float], accepted_at: Sequence[float]) -> float:
    """The chance that a guess is kept, given that those before it were: kept guesses over kept ones
    and first rejections (the estimate of largest likelihood). `proposed_at[i]`, `accepted_at[i]`:
    guesses at the i-th position of a proposal; exact where all proposals are of one length. 0 where
    nothing was proposed."""
    kept = sum(accepted_at)
    full = 0.0  # proposals kept whole, by their last position
    for i, count in enumerate(proposed_at):
        longer = proposed_at[i + 1] if i + 1 < len(proposed_at) else 0.0
        if count > longer and i < len(accepted_at):
            full += min(accepted_at[i], count - longer)
    rejections = (proposed_at[0] if proposed_at else 0.0) - full
    return kept / (kept + rejections) if kept + rejections > 0 else 0.0


def rows_of(costs: Costs, speeds: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each speed with what the formula says, and the shares of it that were reached."""
    for speed in speeds:
        k, speedup = int(speed.name.removeprefix("K=")), speed.ratio.value
        a = acceptance_of(speed.guesses.proposed_at, speed.guesses.accepted_at)
        promised = with_verification(a, k, costs.draft_ratio)
        possible = with_verification(a, k, costs.draft_ratio, costs.ratios[k])
        yield {
            "k": k,
            "temperature": speed.temperature,
            "rate": speed.rate.value,
            "speedup": speedup,
            "acceptance": a,
            "tokens_per_round": speed.tokens_per_round,
            "leviathan": promised,
            "efficiency": speedup / promised,
            "with_verification": possible,
            "of_costs": speedup / possible,
        }


def card(found: Found, pair: Pair) -> Iterator[str]:
    """The page for people."""
    costs = found.costs
    yield heading("Foredraft bench machine", {**pair_facts(pair), "rounds": found.rounds})
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
    lines = [["", "tokens/s", "of K=0", "accept", "tok/rnd", "Leviathan", "reached", "costs say",
              "reached"]]  # fmt: skip
    for row in rows_of(costs, found.speeds):
        names = ("acceptance", "tokens_per_round", "leviathan", "efficiency", "with_verification")
        shown = [f"{row[name]:.2f}" for name in ("speedup", *names, "of_costs")]
        lines.append([f"T={row['temperature']:g} K={row['k']}", f"{row['rate']:.1f}", *shown])
    yield from table(lines)
    yield f"texts of all K equal: {'yes' if found.equal else 'no'}"


if __name__ == "__main__":
    sys.exit(main())
