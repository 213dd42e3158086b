"""What steps cost on this machine: a few timed forwards at start, so that the first K is informed.

Runs on blocks that nobody holds yet; what it writes there is overwritten before it is read.
"""

from __future__ import annotations

import time

from engine.config import EngineConfig, ScheduleConfig
from engine.model.batch import Segment
from engine.model.kv_cache import KVCache
from engine.model.runner import ModelRunner
from engine.profile import BATCHES, CONTEXT, LONG_CONTEXT, Points, Profile, alone, in_fours, telling

REPEATS = 3  # the least tells: whatever else a machine does only takes time
_SOME = 16  # sequences that tell what context costs
BUDGET_SECONDS = 1.5  # for the larger batches; on a slow machine some are left out


def profile_at_start(
    config: EngineConfig,
    target: ModelRunner,
    draft: ModelRunner | None,
    cache: KVCache,
    longest: int,
) -> Profile:
    """For the sizes that the schedule can reach; nothing where nobody would use it. `longest`:
    tokens of a sequence."""
    speculation, schedule = config.speculation, config.schedule
    if speculation.controller.kind != "adaptive" and speculation.trace is None:
        return Profile()
    most = min(schedule.max_step_tokens, schedule.max_sequences)
    k_max = speculation.k_max
    single = profile_alone(target, cache, k_max, schedule)
    several = profile_batches(target, cache, k_max, schedule) if single[1:] else {}
    return Profile(
        target=[*single, *profile_plain(target, cache, 16, most)],
        draft=profile_plain(draft, cache, 1, most) if draft else (),
        batches={1: single, **several} if single[1:] else {},
        padded=target.padded,
        token_seconds=(
            profile_context(target, cache, min(most, _SOME), longest),
            profile_context(draft, cache, min(most, _SOME), longest) if draft else 0.0,
        ),
    )


def profile_alone(
    runner: ModelRunner, cache: KVCache, k_max: int, schedule: ScheduleConfig
) -> Points:
    """(rows, seconds) of one sequence with growing proposals; only what fits the cache."""
    sizes = [rows for rows in alone(k_max) if rows <= schedule.max_step_tokens]
    return [(rows, _seconds(runner, cache, 1, rows)) for rows in sizes if _fits(cache, 1, rows)]


def profile_plain(runner: ModelRunner, cache: KVCache, first: int, last: int) -> Points:
    """(sequences, seconds) of forwards with a row of each."""
    sizes = [n for n in in_fours(first, last) if _fits(cache, n, 1)]
    return [(n, _seconds(runner, cache, n, 1)) for n in sizes]


def profile_batches(
    runner: ModelRunner, cache: KVCache, k_max: int, schedule: ScheduleConfig
) -> dict[int, Points]:
    """By number of sequences, (rows, seconds) with growing proposals. Attention's share is paid by
    sequence and the products' by row, so one curve does not do for all."""
    found: dict[int, Points] = {}
    began = time.perf_counter()
    for sequences, lengths in BATCHES:
        points: list[tuple[int, float]] = []
        for rows in telling(lengths, k_max):
            allowed = sequences * rows <= schedule.max_step_tokens
            if sequences > schedule.max_sequences or not allowed:
                break
            if time.perf_counter() - began > BUDGET_SECONDS or not _fits(cache, sequences, rows):
                break
            points.append((sequences * rows, _seconds(runner, cache, sequences, rows)))
        if len(points) > 1:
            found[sequences] = points
    return found


def profile_context(runner: ModelRunner, cache: KVCache, sequences: int, longest: int) -> float:
    """Seconds more for each token of context; 0 where that is not known."""
    if longest <= LONG_CONTEXT or not _fits(cache, sequences, 1, LONG_CONTEXT):
        return 0.0
    short, long = (_seconds(runner, cache, sequences, 1, n) for n in (CONTEXT, LONG_CONTEXT))
    return max(long - short, 0.0) / (sequences * (LONG_CONTEXT - CONTEXT))


def _blocks_each(cache: KVCache, rows: int, context: int) -> int:
    return -(-(context + rows) // cache.block_size)


def _fits(cache: KVCache, sequences: int, rows: int, context: int = CONTEXT) -> bool:
    return sequences * _blocks_each(cache, rows, context) <= cache.num_blocks


def _seconds(
    runner: ModelRunner, cache: KVCache, sequences: int, rows: int, context: int = CONTEXT
) -> float:
    each = _blocks_each(cache, rows, context)
    batch = [
        Segment(
            tokens=[0] * rows,
            start=context,
            blocks=list(range(i * each, (i + 1) * each)),
            num_logits=rows,
        )
        for i in range(sequences)
    ]
    return min([_timed(runner, batch) for _ in range(1 + REPEATS)][1:])


def _timed(runner: ModelRunner, batch: list[Segment]) -> float:
    runner.forward(batch)
    runner.wait()
    return runner.seconds
