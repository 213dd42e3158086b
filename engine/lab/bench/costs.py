"""Measure the cost of forwards by rows; compare it with bandwidth and with Leviathan's formula.

Leviathan et al. (arXiv:2211.17192): with acceptance a per position and a draft step costing c
target steps, a round of k draft tokens gives (1 - a^(k+1)) / (1 - a) tokens and takes k c + 1
target steps, as if k + 1 rows took as long as one. `speed_up` can use the measured cost instead.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.cpu.fused import FusedDecoder
from engine.lab.bench.offline import Clock
from engine.lab.comparison.figures import Comparison
from engine.lab.comparison.report import table
from engine.lab.comparison.workload import OFF
from engine.lab.plan.roofline import expected_tokens
from engine.model.kv_cache import KVCache, bytes_per_token
from engine.model.loaded import LoadedModel
from engine.model.pair import Pair, build_cache, runner_of
from engine.model.runner import DeviceTimer, HostTimer, ModelRunner
from engine.scheduling.segment import Segment
from engine.step.profiling import CHAINED, ForwardTimer

CONTEXT, ROWS = 256, 17  # tokens before the timed rows; the most rows
COPIED, COPIES = 1 << 26, 8  # float32 numbers, more than caches hold; how often they are copied
SETTLING = 4  # untimed forwards that bring a small model back into the caches after a copy


@dataclass(frozen=True, slots=True)
class Costs:
    """`rows[i]`: seconds of a target forward of i + 1 rows; `ratios[i]`: relative to one row.
    `draft`: seconds of a draft step after a target forward; `draft_ratio`: relative to a one-row
    target forward; both 0 without a draft. Bandwidths in bytes per second: `copy` counts reads and
    writes, `read` what a one-row forward must read."""

    rows: list[float]
    ratios: list[float]
    draft: float
    draft_ratio: float
    copy: float
    read: float
    weight_bytes: int


def measure_costs(config: EngineConfig, pair: Pair, *, rounds: int, clock: Clock) -> Costs:
    """Measure all costs once per round and return the medians, for ratios those of per-round ones.
    Raises EngineError."""
    longest = min(CONTEXT + ROWS, pair.target.max_model_len)
    start = longest - ROWS
    found = _measured(config, pair, longest, rounds=rounds, clock=clock)
    if pair.target.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # the engines' memory planning asks the device what is free
    *rows, drafted, copied = (median(column) for column in zip(*found, strict=True))
    shares = [[second / round_[0] for second in round_] for round_ in found]
    *ratios, draft_ratio, _ = (median(column) for column in zip(*shares, strict=True))
    weights = weight_bytes(pair.target)
    return Costs(
        rows=rows,
        ratios=ratios,
        draft=drafted,
        draft_ratio=draft_ratio,
        copy=copied,
        read=(weights + start * bytes_per_token(pair.target.layers, pair.target.dtype)) / rows[0],
        weight_bytes=weights,
    )


def _measured(
    config: EngineConfig, pair: Pair, longest: int, *, rounds: int, clock: Clock
) -> list[list[float]]:
    """Return per round: seconds of 1 to ROWS rows and of a draft step, and the rate of a copy.
    Uses a KV pool of an engine's size, since the cost of a step may depend on it."""
    cache, _ = build_cache(config, pair)
    blocks = list(cache.own[: -(-longest // cache.block_size)])
    target = runner_of(config, pair.target, cache, clock)
    draft = runner_of(config, pair.draft, cache, clock) if pair.draft else None
    start = longest - ROWS
    source = torch.ones(COPIED, device=cache.device)
    sink = torch.empty_like(source)
    found: list[list[float]] = []
    for _ in range(rounds + 1):
        for _ in range(SETTLING):
            _forward(target, start, blocks, 1)
        seconds = [_forward(target, start, blocks, n) for n in range(1, ROWS + 1)]
        seconds.append(_drafted(draft, cache, start, blocks) if draft else 0.0)
        found.append([*seconds, _copy(source, sink, clock)])
    return found[1:]  # the first round is a warm-up


def _drafted(draft: ModelRunner, cache: KVCache, start: int, blocks: list[int]) -> float:
    """Return the seconds of a draft step; on CUDA of a step within a chain, as drafts run there."""
    timer = ForwardTimer(draft, cache)
    if cache.device.type == "cuda" and timer.chains(1, CHAINED):
        return timer.chained(1, CHAINED)
    return _forward(draft, start, blocks, 1)


def _forward(runner: ModelRunner, start: int, blocks: list[int], rows: int) -> float:
    """Return the seconds of a forward of `rows` rows."""
    tokens = [row % runner.model.vocab_size for row in range(rows)]  # equal tokens share experts
    runner.forward([Segment(tokens, start, blocks, rows)])
    runner.wait()
    return runner.seconds


def _copy(source: Tensor, sink: Tensor, clock: Clock) -> float:
    """Return bytes per second read plus written; on CUDA by the device's clock."""
    timer = DeviceTimer() if source.is_cuda else HostTimer(clock)
    with timer:
        for _ in range(COPIES):
            sink.copy_(source)
    timer.wait()
    return COPIES * 2 * source.nbytes / timer.read()


def weight_bytes(model: LoadedModel) -> int:
    """Return the bytes of weights that a one-row forward reads, in the form used for few rows: all
    weights, without the embedding if it is not tied to the head."""
    if model.compiled is not None:
        return model.compiled.packed_bytes
    if isinstance(model.logits, FusedDecoder) and model.logits.packed_bytes:
        return model.logits.packed_bytes
    head = model.model.get_output_embeddings().weight
    embedding = model.model.get_input_embeddings().weight
    held = sum(parameter.nbytes for parameter in model.model.parameters())
    return int(held - embedding.nbytes * (head is not embedding))


def speed_up(acceptance: float, k: int, draft_cost: float, verification: float = 1.0) -> float:
    """Return the speed-up over plain decoding; Leviathan's if `verification` is 1. `draft_cost`: a
    draft step, `verification`: a target step of k + 1 rows, both in one-row target steps."""
    return expected_tokens(acceptance, k) / (k * draft_cost + verification)


def promises(costs: Costs, comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield for each fixed K at concurrency 1 the speed-up over K = 0: the measured one, the one by
    Leviathan's formula, and the one possible at the measured costs."""
    for cell in comparison.cells:
        for arm, runs in cell.rounds.items():
            ratio = cell.ratio(arm, OFF)
            if ratio is None or arm.mode != "fixed" or cell.workload.concurrency > 1:
                continue
            chance = mean(run.chance for run in runs)
            yield {
                "workload": cell.workload.text,
                "k": arm.k,
                "reached": ratio.value,
                "acceptance": chance,
                "leviathan": speed_up(chance, arm.k, costs.draft_ratio),
                "possible": speed_up(chance, arm.k, costs.draft_ratio, costs.ratios[arm.k]),
            }


def cost_lines(costs: Costs, comparison: Comparison) -> Iterator[str]:
    """Yield the report's lines."""
    yield (
        f"one row after {CONTEXT} tokens: {costs.rows[0] * 1e3:.2f} ms, "
        f"{costs.weight_bytes / 1e6:.0f} MB of weights: {costs.read / 1e9:.1f} GB/s read; "
        f"a copy moves {costs.copy / 1e9:.1f} GB/s ({costs.read / costs.copy:.2f} of it)"
    )
    if costs.draft:
        yield (
            f"a draft step right after a target step: {costs.draft * 1e3:.2f} ms, "
            f"{costs.draft_ratio:.3f} of a target step"
        )
    yield "verification, t(K+1 rows) / t(1 row):"
    for first in (1, 9):
        yield "  " + "  ".join(f"K={k} {costs.ratios[k]:.2f}" for k in range(first, first + 8))
    rows = [["", "of K=0", "accept", "Leviathan", "reached", "costs say", "reached"]]
    for found in promises(costs, comparison):
        reached, promised, possible = found["reached"], found["leviathan"], found["possible"]
        shares = promised, reached / promised, possible, reached / possible
        shown = [f"{value:.2f}" for value in (reached, found["acceptance"], *shares)]
        rows.append([f"{found['workload']} K={found['k']}", *shown])
    yield from table(rows)
