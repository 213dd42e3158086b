"""Step costs on this machine: a few timed forwards at start, so that the first K is informed.

Forwards are timed as steps run them, since CPU caches hold the data of the previous forward: a
verifying forward follows the draft forwards of its proposal, a forward without speculation follows
others like it, and sequences lie far apart. All rows have different tokens, so that mixtures of
experts read as many experts as in service. Uses blocks that no sequence holds yet; what it writes
there is overwritten before it is read.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import cycle, islice, repeat
from math import inf
from random import Random
from statistics import median_low

from engine.config import EngineConfig, ScheduleConfig
from engine.control.profile import (
    BATCHES,
    CONTEXT,
    LONG_CONTEXT,
    ROWS_OF_ONE,
    Points,
    Profile,
    row_counts,
    times_four,
)
from engine.messages import SamplingParams
from engine.model.kv_cache import KVCache
from engine.model.runner import ModelRunner
from engine.progress import counted
from engine.sampling.logits import LogitsProcessor
from engine.sampling.plain import Rows, plain_of
from engine.sampling.row_params import fields_of, plan_of, shape_of
from engine.scheduling.segment import Segment, Start
from engine.scheduling.sequence import Sequence

TURNS, LEAST_TURNS = 4, 2  # lower median: disturbances only add time
SWEEPS_SECONDS = 0.02  # a longer forward reads far more than the caches hold
TURNS_SECONDS = 0.12  # after this time LEAST_TURNS are enough
_SETTLED = 0.97  # above this share of the previous time, caches have settled
# Forwards before a timed one with one row per sequence: a step without speculation follows others
# like it, and about ten fill the caches. No more are run after `_ALIKE_SECONDS`.
ALIKE, _ALIKE_SECONDS = 10, 0.01
CHAINED = 5  # draft steps in a timed chain
_SOME = 16  # maximum sequences when the cost of context is measured
_TOKENS = 1 << 12  # maximum number of different token ids
BUDGET_SECONDS = 1.5  # time for the batches; slow machines skip some

_Size = tuple[int, int, int]  # sequences, rows of each, tokens before them


def profile_at_start(
    config: EngineConfig,
    target: ModelRunner,
    draft: ModelRunner | None,
    cache: KVCache,
    longest: int,
) -> Profile:
    """Return the profile for the sizes that the schedule can reach; empty if nothing would use it.
    `longest`: maximum tokens of a sequence."""
    speculation, schedule = config.speculation, config.schedule
    if speculation.controller.kind != "adaptive" and speculation.trace is None:
        return Profile()
    most = min(schedule.max_step_tokens, schedule.max_sequences)
    targets, k_max = ForwardTimer(target, cache, draft), speculation.k_max
    drafts = ForwardTimer(draft, cache) if draft else None
    alone = row_counts(ROWS_OF_ONE, k_max)
    single = targets.points((1, n) for n in alone if n <= schedule.max_step_tokens)
    several = profile_batches(targets, k_max, schedule) if single[1:] else {}
    baselines = {n: points[0][1] for n, points in several.items()}
    sizes = [*times_four(16, most)]
    rest = targets.points((n, 1) for n in sizes if n not in baselines)
    larger = {n: [(n, seconds)] for n, seconds in rest}
    return Profile(
        target=[*single, *((n, baselines[n]) for n in sizes if n in baselines), *rest],
        draft=profile_draft(drafts, k_max, times_four(1, most)) if drafts else (),
        batches={1: single, **several, **larger} if single[1:] else {},
        padded=target.padded,
        token_seconds=profile_contexts(targets, drafts, min(most, _SOME), longest),
        draft_window=drafts.window if drafts else inf,
    )


def profile_another(
    config: EngineConfig, draft: ModelRunner, cache: KVCache, known: Profile
) -> Generator[None, None, Profile]:
    """Return `known` with the step costs of another draft. They are measured piece by piece, for up
    to `_SOME` sequences, since requests wait meanwhile. Overwrites the draft's KV plane."""
    timer, schedule = ForwardTimer(draft, cache), config.schedule
    points: list[tuple[int, float]] = []
    contexts = dict(known.token_seconds)
    for n in times_four(1, min(schedule.max_step_tokens, schedule.max_sequences, _SOME)):
        points += profile_draft(timer, config.speculation.k_max, (n,))
        yield
        if n in contexts:
            contexts[n] = (contexts[n][0], _seconds_per_token(timer, n))
            yield
    window = timer.window
    return replace(known, draft=points, token_seconds=contexts, draft_window=window)


def profile_draft(timer: ForwardTimer, k_max: int, sequences: Iterable[int]) -> Points:
    """Return (sequences, seconds) of one draft step. If a whole proposal is one call: of each step
    in it after the first, which has no host overhead and reads from warm caches."""
    steps, numbers = min(k_max, CHAINED), list(sequences)
    chained = [n for n in numbers if steps > 1 and timer.chains(n, steps)]
    points = [(n, timer.chained(n, steps)) for n in chained if timer.fits(n, 1 + steps)]
    return [*points, *timer.points((n, 1) for n in numbers if n not in chained)]


def profile_batches(timer: ForwardTimer, k_max: int, schedule: ScheduleConfig) -> dict[int, Points]:
    """Return, by number of sequences, (rows, seconds) with growing proposals. Attention's cost
    depends on sequences, that of matrix products on rows, so one curve is not enough."""
    batches: dict[int, Points] = {}
    began = time.perf_counter()
    for sequences, lengths in BATCHES:
        if sequences > schedule.max_sequences:
            continue
        most = schedule.max_step_tokens // sequences
        sizes = [(sequences, rows) for rows in row_counts(lengths, k_max) if rows <= most]
        points = timer.points(sizes, budget=BUDGET_SECONDS - (time.perf_counter() - began))
        if len(points) > 1:
            batches[sequences] = points
    return batches


def profile_contexts(
    targets: ForwardTimer, drafts: ForwardTimer | None, most: int, longest: int
) -> dict[int, tuple[float, float]]:
    """Return, by number of sequences, the additional seconds per token of context, of target and
    draft; empty if not known."""
    if longest <= LONG_CONTEXT:
        return {}
    sizes = [n for n in times_four(1, most) if targets.fits(n, 1, LONG_CONTEXT)]
    return {n: (_seconds_per_token(targets, n), _seconds_per_token(drafts, n)) for n in sizes}


def _seconds_per_token(timer: ForwardTimer | None, sequences: int) -> float:
    if timer is None:
        return 0.0
    short, long = timer.seconds([(sequences, 1)] * 2, contexts=(CONTEXT, LONG_CONTEXT))
    seen = min(LONG_CONTEXT, timer.window) - CONTEXT
    return max(long - short, 0.0) / (sequences * seen) if seen > 0 else 0.0


class ForwardTimer:
    """Times forwards of `runner`, each after the forwards that precede it in a step: the forwards
    of `draft`, if there is one, that draft its proposal."""

    def __init__(
        self, runner: ModelRunner, cache: KVCache, draft: ModelRunner | None = None
    ) -> None:
        self._runner, self._cache, self._draft = runner, cache, draft
        vocab = min(each.model.vocab_size for each in (runner, draft) if each is not None)
        self._tokens = cycle(Random(0).sample(range(vocab), min(vocab, _TOKENS)))
        self.window = inf if runner.window is None else float(runner.window.tokens)
        self._evicts_caches = False  # whether a forward evicts all that the caches held

    def chains(self, sequences: int, steps: int) -> bool:
        """Whether a proposal of this many steps is one call."""
        if self._runner.draws_chains(sequences) or not self.fits(sequences, 1 + steps):
            return self._runner.draws_chains(sequences)
        starts = self._starts(self._batch((sequences, 1, CONTEXT), blocks_for=1 + steps))
        return self._runner.fits_chain(starts, steps)

    def fits(self, sequences: int, rows: int, context: int = CONTEXT) -> bool:
        return sequences * self._blocks_each(rows, context) <= len(self._cache.blocks)

    def points(self, sizes: Iterable[tuple[int, int]], *, budget: float = inf) -> Points:
        """Return (rows of all, seconds) by (sequences, rows) that fits the cache; see `seconds`."""
        sizes = [size for size in sizes if self.fits(*size)]
        seconds = self.seconds(sizes, budget=budget)
        return [(n * rows, each) for (n, rows), each in zip(sizes, seconds, strict=False)]

    def seconds(
        self,
        sizes: Seq[tuple[int, int]],
        *,
        contexts: Iterable[int] = repeat(CONTEXT),
        budget: float = inf,
    ) -> list[float]:
        """Return the lower median for each (sequences, rows), as many as the budget allows. Sizes
        are timed in turns, back and forth: one slow moment of the machine must not make a size look
        expensive for good, and the smallest must not always follow the largest."""
        began, times_of = time.perf_counter(), list[list[float]]()
        planned = [(*size, context) for size, context in zip(sizes, contexts, strict=False)]
        if planned and budget > 0.0:
            self._warm_up(planned[0])
        for size in counted("timing forwards", planned):
            if LEAST_TURNS * (time.perf_counter() - began) > budget:
                break
            times_of.append([self._time_once(size)])
        for turn in range(1, TURNS):
            if turn >= LEAST_TURNS and time.perf_counter() - began > TURNS_SECONDS:
                break
            order = range(len(times_of))
            for i in reversed(order) if turn % 2 else order:
                times_of[i].append(self._time_once(planned[i]))
        return [median_low(times) for times in times_of]

    def prompt(self, rows: int, context: int) -> float:
        """Return the seconds of a prompt's last chunk of `rows` tokens after `context` others: the
        lower median, with no draft's forwards before it."""
        (segment,) = self._batch((1, rows, context))
        batch = [segment._replace(num_logits=1)]
        return median_low([_forward_seconds(self._runner, batch) for _ in range(TURNS)])

    def chained(self, sequences: int, steps: int) -> float:
        """Return the seconds of one step in chains of `steps` steps."""
        runner, batch = self._runner, self._batch((sequences, 1, CONTEXT), blocks_for=1 + steps)
        output, starts = runner.forward(batch), self._starts(batch)
        params = SamplingParams(seed=0, max_tokens=2)
        plains = [(plain_of(params), None)] * sequences
        seq = Sequence("", params, [0], 1)
        on_host = runner.draws_chains(sequences)
        _device_seconds(runner)  # discard the seconds of `forward` above

        def timed(count: int) -> float:
            steps = [count] * sequences
            if on_host:
                runner.chain(output, range(sequences), starts, steps=steps, params=plains)
            else:  # one graph
                rows = [Rows(seq, 0, count, CONTEXT + 1)] * sequences
                fields = fields_of([seq] * sequences, LogitsProcessor(()), runner.vocab_size)
                table = plan_of(rows, fields, shape_of(rows, fields)).table
                runner.unseen_chain(output, starts, steps=steps, table=table)
            return _device_seconds(runner)

        turns = [(timed(1), timed(steps)) for _ in range(1 + TURNS)][1:]
        short, long = (median_low(times) for times in zip(*turns, strict=True))
        step: float = max(long - short, 0.0) / (steps - 1)
        return step

    def _starts(self, batch: list[Segment]) -> list[Start]:
        return [Start(segment.blocks, CONTEXT + 1) for segment in batch]

    def _warm_up(self, size: _Size) -> None:
        """Run the first size until its time settles: old data leaves the CPU caches slowly."""
        before = inf
        for _ in range(TURNS):
            seconds = self._time(self._batch(size))
            if self._evicts_caches or seconds > _SETTLED * before:
                break
            before = seconds

    def _time_once(self, size: _Size) -> float:
        batch, (_, rows, _) = self._batch(size), size
        if not self._evicts_caches and rows == 1:
            self._repeat(size)
        elif not self._evicts_caches and self._draft is not None:
            for row in range(rows - 1):
                _forward_seconds(self._draft, [_row(segment, row) for segment in batch])
        return self._time(batch)

    def _repeat(self, size: _Size) -> None:
        began = time.perf_counter()
        for _ in range(ALIKE):
            _forward_seconds(self._runner, self._batch(size))
            if time.perf_counter() - began > _ALIKE_SECONDS:
                break

    def _time(self, batch: list[Segment]) -> float:
        began = time.perf_counter()
        seconds = _forward_seconds(self._runner, batch)
        self._evicts_caches = time.perf_counter() - began > SWEEPS_SECONDS
        return seconds

    def _blocks_each(self, rows: int, context: int) -> int:
        return -(-(context + rows) // self._cache.block_size)

    def _batch(self, size: _Size, *, blocks_for: int = 0) -> list[Segment]:
        """Return segments, each sequence in consecutive blocks, the sequences as far apart as
        possible: the pool leaves each room to grow, and side by side they would share memory pages.
        Each gets blocks for `blocks_for` rows, if that is more."""
        sequences, rows, context = size
        blocks, each = self._cache.blocks, self._blocks_each(max(rows, blocks_for), context)
        apart = len(blocks) // sequences
        return [
            Segment(
                list(islice(self._tokens, rows)), context, [*blocks[first : first + each]], rows
            )
            for first in range(0, sequences * apart, apart)
        ]


def _row(segment: Segment, at: int) -> Segment:
    return Segment(segment.tokens[at : at + 1], segment.start + at, segment.blocks, 1)


def _forward_seconds(runner: ModelRunner, batch: list[Segment]) -> float:
    # As steps run them: without draft tokens, a proposer may learn nothing (see Rounds).
    runner.forward(batch, states=runner.every_state or batch[0].num_logits > 1)
    return _device_seconds(runner)


def _device_seconds(runner: ModelRunner) -> float:
    """Return the runner's seconds. Call at once: a device adds unread ones to the next reading."""
    runner.wait()
    return runner.seconds
