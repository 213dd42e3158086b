"""Timed forwards: rows of one sequence through the target, one through the draft, and a copy.

Everything is measured in rounds, each thing once a round, so that a machine that slows down slows
all of it; ratios are medians of ratios within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from engine.config import EngineConfig
from engine.cpu.packed import PackedDecoder
from engine.model.kv_cache import bytes_per_token
from engine.model.loaded import LoadedModel
from engine.model.pair import Pair, build_cache, runner_of
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment

CONTEXT = 256  # tokens before the timed rows
MOST_GUESSES = 16
COPIED = 1 << 26  # float32 numbers: more than any cache holds
SETTLING = 4  # forwards until a small model is in the caches again, which a copy drove it out of


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


def measure_costs(
    config: EngineConfig, pair: Pair, *, rounds: int, clock: Callable[[], float]
) -> Costs:
    """Raises MemoryPlanError where the cache cannot hold `CONTEXT` tokens."""
    cache, plan = build_cache(config, pair)
    longest = min(CONTEXT + MOST_GUESSES + 1, plan.blocks * cache.block_size)
    longest = min(longest, pair.target.max_model_len)
    start = longest - MOST_GUESSES - 1
    table = list(range(-(-longest // cache.block_size)))
    target = runner_of(config, pair.target, cache, clock)
    draft = runner_of(config, pair.draft, cache, clock) if pair.draft else None
    source = torch.ones(COPIED, device=pair.target.device)
    sink = torch.empty_like(source)
    rows: list[list[float]] = [[] for _ in range(MOST_GUESSES + 1)]
    drafts, copies = [], []
    for round_ in range(rounds + 1):  # the first one is warm-up
        seconds = []
        for _ in range(SETTLING):
            _forward(target, Segment([0], start, table, 1))
        for count in range(1, MOST_GUESSES + 2):
            seconds.append(_forward(target, Segment([0] * count, start, table, count)))
        drafted = 0.0
        if draft is not None:
            drafted = _forward(draft, Segment([0], start, table, 1))
        copied = copy_seconds(source, sink, clock)
        if round_ == 0:
            continue
        for kept, second in zip(rows, seconds, strict=True):
            kept.append(second)
        drafts.append(drafted)
        copies.append(copied)
    ratios = [_ratio(kept, rows[0]) for kept in rows]
    weights = weight_bytes(pair.target)
    read = weights + start * bytes_per_token(pair.target.layers, pair.target.dtype)
    return Costs(
        rows=[median(kept) for kept in rows],
        ratios=ratios,
        draft=median(drafts) if draft is not None else None,
        draft_ratio=_ratio(drafts, rows[0]),
        copy=2 * source.nbytes / median(copies),
        read=read / median(rows[0]),
        weight_bytes=weights,
    )


def _forward(runner: ModelRunner, segment: Segment) -> float:
    runner.forward([segment])
    runner.wait()
    return runner.seconds


def copy_seconds(source: torch.Tensor, sink: torch.Tensor, clock: Callable[[], float]) -> float:
    """Of one copy."""
    started = clock()
    sink.copy_(source)
    if source.device.type == "cuda":
        torch.cuda.synchronize(source.device)
    return clock() - started


def _ratio(some: Sequence[float], base: Sequence[float]) -> float:
    return median(a / b for a, b in zip(some, base, strict=True))


def weight_bytes(model: LoadedModel) -> int:
    """What a forward of one row reads of the weights, in the size in which they are held for few
    rows."""
    if model.compiled is not None:
        return model.compiled.packed_bytes
    packed = isinstance(model.logits, PackedDecoder)
    return weights_used(model) * (torch.bfloat16.itemsize if packed else model.dtype.itemsize)


def weights_used(model: LoadedModel) -> int:
    """By a row: all but the embedding, if the output has weights of its own."""
    head = model.model.get_output_embeddings().weight
    embedding = model.model.get_input_embeddings().weight
    numbers = sum(p.numel() for p in model.model.parameters())
    return int(numbers - embedding.numel() * (head.data_ptr() != embedding.data_ptr()))
