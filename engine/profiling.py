"""What steps cost on this machine: a few timed forwards at start, so that the first K is informed.

Runs on blocks that nobody holds yet; what it writes there is overwritten before it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import repeat
from math import inf

from engine.config import EngineConfig, ScheduleConfig
from engine.messages import SamplingParams
from engine.model.batch import Segment
from engine.model.compiled import Start
from engine.model.kv_cache import KVCache
from engine.model.runner import ModelRunner
from engine.profile import BATCHES, CONTEXT, LONG_CONTEXT, Points, Profile, alone, in_fours, telling
from engine.sampling.plain import plain_of

REPEATS = 3  # the least tells: whatever else a machine does only takes time
_CHAINED = 5  # draft steps in a chain that is timed
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
        draft=profile_draft(draft, cache, k_max, most) if draft else (),
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
    sizes = [rows for rows in sizes if _fits(cache, 1, rows)]
    found = _measured(runner, cache, [(1, rows) for rows in sizes])
    return list(zip(sizes, found, strict=True))


def profile_plain(runner: ModelRunner, cache: KVCache, first: int, last: int) -> Points:
    """(sequences, seconds) of forwards with a row of each."""
    sizes = [n for n in in_fours(first, last) if _fits(cache, n, 1)]
    return list(zip(sizes, _measured(runner, cache, [(n, 1) for n in sizes]), strict=True))


def profile_draft(runner: ModelRunner, cache: KVCache, k_max: int, last: int) -> Points:
    """(sequences, seconds) of one draft step. Where a proposal is one call, of each step in it
    after the first: the host has no part in those, and what they need is in the caches."""
    steps = min(k_max, _CHAINED)
    if steps < 2 or not runner.draws_chains(1):
        return profile_plain(runner, cache, 1, last)
    found = list[tuple[int, float]]()
    for n in in_fours(1, last):
        if not runner.draws_chains(n):
            return [*found, *profile_plain(runner, cache, n, last)]
        if _fits(cache, n, steps):
            found.append((n, _chained(runner, cache, n, steps)))
    return found


def _chained(runner: ModelRunner, cache: KVCache, sequences: int, steps: int) -> float:
    """Seconds of a step of chains of so many."""
    batch = _batch(cache, sequences, 1, CONTEXT, blocks_for=steps)
    output, rows = runner.forward(batch), range(sequences)
    starts = [Start(segment.blocks, CONTEXT + 1) for segment in batch]
    asked = [(plain_of(SamplingParams(seed=0, max_tokens=2)), None)] * sequences

    def timed(count: int) -> float:
        runner.chain(output, rows, starts, steps=[count] * sequences, asked=asked)
        seconds: float = runner.seconds
        return seconds

    turns = [(timed(1), timed(steps)) for _ in range(1 + REPEATS)][1:]
    short, long = (min(times) for times in zip(*turns, strict=True))
    step: float = max(long - short, 0.0) / (steps - 1)
    return step


def profile_batches(
    runner: ModelRunner, cache: KVCache, k_max: int, schedule: ScheduleConfig
) -> dict[int, Points]:
    """By number of sequences, (rows, seconds) with growing proposals. Attention's share is paid by
    sequence and the products' by row, so one curve does not do for all."""
    found: dict[int, Points] = {}
    began = time.perf_counter()
    for sequences, lengths in BATCHES:
        if sequences > schedule.max_sequences:
            continue
        sizes = [
            (sequences, rows)
            for rows in telling(lengths, k_max)
            if sequences * rows <= schedule.max_step_tokens and _fits(cache, sequences, rows)
        ]
        left = BUDGET_SECONDS - (time.perf_counter() - began)
        seconds = _measured(runner, cache, sizes, budget=left)
        if len(seconds) > 1:
            pairs = zip(sizes, seconds, strict=False)
            found[sequences] = [(sequences * rows, each) for (_, rows), each in pairs]
    return found


def profile_context(runner: ModelRunner, cache: KVCache, sequences: int, longest: int) -> float:
    """Seconds more for each token of context; 0 where that is not known."""
    if longest <= LONG_CONTEXT or not _fits(cache, sequences, 1, LONG_CONTEXT):
        return 0.0
    contexts = (CONTEXT, LONG_CONTEXT)
    short, long = _measured(runner, cache, [(sequences, 1)] * 2, contexts=contexts)
    return max(long - short, 0.0) / (sequences * (LONG_CONTEXT - CONTEXT))


def _blocks_each(cache: KVCache, rows: int, context: int) -> int:
    return -(-(context + rows) // cache.block_size)


def _fits(cache: KVCache, sequences: int, rows: int, context: int = CONTEXT) -> bool:
    return sequences * _blocks_each(cache, rows, context) <= len(cache.own)


def _measured(
    runner: ModelRunner,
    cache: KVCache,
    sizes: Seq[tuple[int, int]],
    *,
    contexts: Iterable[int] = repeat(CONTEXT),
    budget: float = inf,
) -> list[float]:
    """Least seconds of each (sequences, rows), as many as the budget allows. In turns: of sizes
    measured one after the other a slow moment of the machine made some look dear for good."""
    began, batches = time.perf_counter(), list[list[Segment]]()
    for (sequences, rows), context in zip(sizes, contexts, strict=False):
        if (1 + REPEATS) * (time.perf_counter() - began) > budget:
            break
        batches.append(_batch(cache, sequences, rows, context))
        _timed(runner, batches[-1])
    turns = [[_timed(runner, batch) for batch in batches] for _ in range(REPEATS)]
    return [min(times) for times in zip(*turns, strict=True)]


def _batch(
    cache: KVCache, sequences: int, rows: int, context: int, *, blocks_for: int = 0
) -> list[Segment]:
    """`blocks_for`: so many rows, if more than these."""
    each = _blocks_each(cache, max(rows, blocks_for), context)
    return [
        Segment(
            tokens=[0] * rows,
            start=context,
            blocks=list(cache.own[i * each : (i + 1) * each]),
            num_logits=rows,
        )
        for i in range(sequences)
    ]


def _timed(runner: ModelRunner, batch: list[Segment]) -> float:
    runner.forward(batch)
    runner.wait()
    return runner.seconds
