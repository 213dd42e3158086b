"""What steps cost on this machine: a few timed forwards at start, so that the first K is informed.

Runs on blocks that nobody holds yet; what it writes there is overwritten before it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from engine.config import EngineConfig, ScheduleConfig
from engine.model.batch import Segment
from engine.model.kv_cache import KVCache
from engine.model.runner import ModelRunner

CONTEXT = 64  # tokens before the timed rows
REPEATS = 3
ALONE = (1, 2, 3, 4, 5, 7, 9)  # rows of one sequence

BUDGET_SECONDS = 1.0  # for the larger batches; on a slow machine some are left out
BATCHES = ((4, (1, 2, 3, 5, 9)), (16, (1, 2, 3, 5)), (64, (1, 2)))  # sequences, rows of each

Points = list[tuple[int, float]]


class Profile(NamedTuple):
    """Arguments of KController.profile."""

    target: Points
    draft: Points
    host: float
    batches: dict[int, Points]


def profile_at_start(
    config: EngineConfig, target: ModelRunner, draft: ModelRunner | None, cache: KVCache
) -> Profile:
    """For the sizes that the schedule can reach; nothing where nobody would use it."""
    speculation, schedule = config.speculation, config.schedule
    if speculation.controller.kind != "adaptive" and speculation.trace is None:
        return Profile([], [], 0.0, {})
    sequences = min(schedule.max_step_tokens, schedule.max_sequences)
    alone = profile_target(
        target, cache, max_rows=schedule.max_step_tokens, max_sequences=sequences
    )
    return Profile(
        target=alone,
        draft=profile_draft(draft, cache, max_sequences=sequences) if draft else [],
        host=0.0,
        batches=profile_batches(target, cache, alone, schedule),
    )


def profile_target(
    runner: ModelRunner, cache: KVCache, *, max_rows: int, max_sequences: int
) -> Points:
    """(rows, seconds) of the target's forward: one sequence with growing proposals, then growing
    batches of plain rows; only what fits the cache."""
    shapes = [(1, rows) for rows in ALONE if rows <= max_rows]
    shapes += [(n, 1) for n in _doubling(16, max_sequences)]
    return [
        (n * rows, _seconds(runner, cache, n, rows)) for n, rows in shapes if _fits(cache, n, rows)
    ]


def profile_batches(
    runner: ModelRunner, cache: KVCache, alone: Points, schedule: ScheduleConfig
) -> dict[int, Points]:
    """By number of sequences, (rows, seconds) with growing proposals. Attention's share is paid by
    sequence and the products' by row, so one curve does not do for all."""
    found = {1: [(rows, seconds) for rows, seconds in alone if rows in ALONE]}
    began = time.perf_counter()
    for sequences, lengths in BATCHES:
        points: Points = []
        for rows in lengths:
            allowed = sequences * rows <= schedule.max_step_tokens
            if sequences > schedule.max_sequences or not allowed:
                break
            if time.perf_counter() - began > BUDGET_SECONDS or not _fits(cache, sequences, rows):
                break
            points.append((sequences * rows, _seconds(runner, cache, sequences, rows)))
        if len(points) > 1:
            found[sequences] = points
    return {sequences: points for sequences, points in found.items() if len(points) > 1}


def profile_draft(runner: ModelRunner, cache: KVCache, *, max_sequences: int) -> Points:
    """(sequences, seconds) of one draft step."""
    return [
        (n, _seconds(runner, cache, n, 1))
        for n in _doubling(1, max_sequences)
        if _fits(cache, n, 1)
    ]


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 4


def _blocks_each(cache: KVCache, rows: int) -> int:
    return -(-(CONTEXT + rows) // cache.block_size)


def _fits(cache: KVCache, sequences: int, rows: int) -> bool:
    return sequences * _blocks_each(cache, rows) <= cache.num_blocks


def _seconds(runner: ModelRunner, cache: KVCache, sequences: int, rows: int) -> float:
    each = _blocks_each(cache, rows)
    batch = [
        Segment(
            tokens=[0] * rows,
            start=CONTEXT,
            blocks=list(range(i * each, (i + 1) * each)),
            num_logits=rows,
        )
        for i in range(sequences)
    ]
    return median([_timed(runner, batch) for _ in range(1 + REPEATS)][1:])


def _timed(runner: ModelRunner, batch: list[Segment]) -> float:
    runner.forward(batch)
    runner.wait()
    return runner.seconds
