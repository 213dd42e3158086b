"""Measure the cost of forwards by rows; compare it with bandwidth and with Leviathan's formula
(arXiv:2211.17192), by which k + 1 rows take as long as one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from statistics import mean, median
from typing import Any

import torch

from engine.config import EngineConfig
from engine.cpu.fused import FusedDecoder
from engine.lab.bench.offline import Clock
from engine.lab.comparison.figures import Comparison
from engine.lab.comparison.report import table
from engine.lab.comparison.workload import OFF
from engine.lab.plan.machine import fastest
from engine.lab.plan.roofline import expected_tokens
from engine.model.kv_cache import bytes_per_token
from engine.model.loaded import LoadedModel
from engine.model.pair import Pair, build_cache, runner_of
from engine.step.profiling import CHAINED, ForwardTimer, profile_draft

CONTEXT, ROWS = 256, 17  # tokens before the timed rows; the most rows
COPIED = 1 << 26  # float32 numbers, more than caches hold


@dataclass(frozen=True, slots=True)
class Costs:
    """`rows[i]`: seconds of a target forward of i + 1 rows; `ratios[i]`: relative to one row.
    `draft`: seconds of a draft step; `draft_ratio`: relative to a one-row target forward; both 0
    without a draft. Bandwidths in bytes per second: `copy` counts reads and
    writes, `read` what a one-row forward must read."""

    rows: list[float]
    ratios: list[float]
    draft: float
    draft_ratio: float
    copy: float
    read: float
    weight_bytes: int


def measure_costs(config: EngineConfig, pair: Pair, *, rounds: int, clock: Clock) -> Costs:
    """Measure all costs once per round and return the medians. Forwards run as steps run them, see
    ForwardTimer, on a KV pool of an engine's size. Raises EngineError."""
    start = min(CONTEXT, pair.target.max_model_len - ROWS)
    cache, _ = build_cache(config, pair)
    target = runner_of(config, pair.target, cache, clock)
    draft = runner_of(config, pair.draft, cache, clock) if pair.draft else None
    timer, sizes = ForwardTimer(target, cache, draft), [(1, n) for n in range(1, ROWS + 1)]
    drafts = partial(profile_draft, ForwardTimer(draft, cache), CHAINED, (1,)) if draft else None
    found = [  # a draft step: within a chain if drafts run in chains here
        [*timer.seconds(sizes, contexts=repeat(start)), drafts()[0][1] if drafts else 0.0]
        for _ in range(rounds)
    ]
    *rows, drafted = map(median, zip(*found, strict=True))
    copied = _copy(pair.target.device, clock)
    if pair.target.device.type == "cuda":
        del timer, drafts, target, draft, cache
        gc.collect()
        torch.cuda.empty_cache()  # the engines' memory planning asks the device what is free
    weights = weight_bytes(pair.target)
    return Costs(
        rows=rows,
        ratios=[seconds / rows[0] for seconds in rows],
        draft=drafted,
        draft_ratio=drafted / rows[0],
        copy=copied,
        read=(weights + start * bytes_per_token(pair.target.layers, pair.target.dtype)) / rows[0],
        weight_bytes=weights,
    )


def _copy(device: torch.device, clock: Clock) -> float:
    """Return bytes per second read plus written."""
    source = torch.ones(COPIED, device=device)
    sink = torch.empty_like(source)
    return 2 * source.nbytes / fastest(device, partial(sink.copy_, source), clock)


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
    """Yield for each fixed K below ROWS at concurrency 1 the speed-up over K = 0: the measured one,
    the one by Leviathan's formula, and the one possible at the measured costs."""
    for cell in comparison.cells:
        for arm, runs in cell.rounds.items():
            ratio = cell.ratio(arm, OFF)
            timed = arm.mode == "fixed" and arm.k < ROWS and cell.workload.concurrency == 1
            if ratio is None or not timed:
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
            f"a draft step: {costs.draft * 1e3:.2f} ms, {costs.draft_ratio:.3f} of a target step"
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
