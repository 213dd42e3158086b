"""The start-up profile: which sizes it measures under which schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.control.profile import BATCHES, CONTEXT, ROWS_OF_ONE, Profile, row_counts
from engine.core import Engine
from engine.cpu.fused import SHORTEST_TABLE
from engine.messages import SamplingParams, Submit
from engine.model.kv_cache import KVCache
from engine.model.proof import LENGTH
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment, Start, Window
from engine.step import profiling
from engine.step.profiling import ALIKE, LEAST_TURNS, SWEEPS_SECONDS, TURNS, profile_at_start
from tests.support import tiny

ALONE = row_counts(ROWS_OF_ONE, 8)  # of the default K
_TOKEN = 1e-3


class _Timed:
    """A forward takes 1 s, plus 0.1 s per row and 1 ms per token of context."""

    seconds = 0.0
    padded = (1, 2, 4, 8)
    model = SimpleNamespace(vocab_size=100)
    window: Window | None = None
    every_state = False

    def draws_chains(self, sequences: int) -> bool:
        return False

    def fits_chain(self, starts: Sequence[Start], steps: int) -> bool:
        return False

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        context = sum(segment.start for segment in segments)
        rows = sum(len(segment.tokens) for segment in segments)
        self.seconds = 1.0 + 0.1 * rows + _TOKEN * (context - CONTEXT * len(segments))

    def wait(self) -> None:
        pass


class _Restless(_Timed):
    """Forwards 20 to 29, of all those profiled, take twice as long: a slow spell of the machine."""

    def __init__(self) -> None:
        self._count = 0

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        super().forward(segments)
        self._count += 1
        self.seconds *= 2 if 20 <= self._count < 30 else 1


class _Chained(_Timed):
    """A proposal for up to ten sequences is one call: 0.5 s, plus 10 ms per step and sequence."""

    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size

    def draws_chains(self, sequences: int) -> bool:
        return sequences <= 10

    def chain(
        self, output: None, rows: Sequence[int], starts: Sequence[Start], *, steps: Sequence[int],
        params: Sequence[object],
    ) -> None:  # fmt: skip
        assert len(rows) == len(starts) == len(params)
        assert all(len(s.blocks) * self._block_size >= s.position + max(steps) for s in starts)
        self.seconds = 0.5 + 0.01 * sum(steps)


class _Captured(_Timed):
    """Like `_Chained`, but a proposal is one graph, whose seconds can be read once, after the
    device has finished."""

    vocab_size = 100

    def __init__(self) -> None:
        self._begun = self._ended = 0.0

    def fits_chain(self, starts: Sequence[Start], steps: int) -> bool:
        return len(starts) <= 10

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        self._begun += 1.0 + 0.1 * len(segments)

    def unseen_chain(
        self,
        output: None,
        starts: Sequence[Start],
        *,
        steps: Sequence[int],
        table: Sequence[object],
    ) -> None:
        assert len(table) == sum(steps)
        assert len(steps) == len(starts)
        self._begun += 0.5 + 0.01 * sum(steps)

    def wait(self) -> None:
        self._ended, self._begun = self._ended + self._begun, 0.0

    @property
    def seconds(self) -> float:
        read, self._ended = self._ended, 0.0
        return read

    @seconds.setter
    def seconds(self, _given: float) -> None:
        raise AssertionError


class _Crowded(_Timed):
    """With more than eight sequences, each token takes three times as long."""

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        super().forward(segments)
        beyond = sum(segment.start - CONTEXT for segment in segments)
        self.seconds += 2 * _TOKEN * beyond if len(segments) > 8 else 0.0


class _Swept(_Timed):
    """A forward right after the drafter's (`sweeper`) takes 0.5 s more. `drafted` counts forwards
    by (rows, drafter forwards before it)."""

    def __init__(self) -> None:
        self.sweeper = _Sweeper()
        self.drafted = Counter[tuple[int, int]]()

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        super().forward(segments)
        before, self.sweeper.count = self.sweeper.count, 0
        self.drafted[len(segments[0].tokens), before] += 1
        self.seconds += 0.5 if before else 0.0


class _Sweeper(_Timed):
    """`drafted`: how many forwards were beyond a sequence's first position, as a target's are."""

    count = drafted = 0

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        super().forward(segments)
        self.drafted += segments[0].start > CONTEXT
        assert all(len(segment.tokens) == 1 for segment in segments)
        self.count += 1


class _Placed(_Timed):
    """`least`: by number of sequences, the smallest distance between two of them, in blocks."""

    def __init__(self) -> None:
        self.least = dict[int, int]()

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        super().forward(segments)
        blocks = [block for segment in segments for block in segment.blocks]
        assert len(set(blocks)) == len(blocks)
        firsts = [*sorted(segment.blocks[0] for segment in segments), len(_Cache.blocks)]
        apart = min(b - a for a, b in pairwise(firsts))
        self.least[len(segments)] = min(apart, self.least.get(len(segments), apart))


class _Slow(_Timed):
    """Takes `takes` seconds per row by its clock. `counts` counts forwards by rows."""

    def __init__(self, takes: float) -> None:
        self._takes, self.counts, self.clock = takes, Counter[int](), _Clock()

    def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
        super().forward(segments)
        self.counts[len(segments[0].tokens)] += 1
        self.clock.now += self._takes * len(segments[0].tokens)


class _Clock:
    """Stands still but for what forwards take, whatever else this machine does."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Cache:
    blocks = range(1000)

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size


def _profile(
    longest: int = 1024,
    speculation: dict[str, Any] | None = None,
    timed: _Timed | None = None,
    draft: _Timed | None = None,
    block_size: int = 16,
    **schedule: Any,
) -> Profile:
    settings = {"target": {"path": "x"}, "schedule": schedule, "speculation": speculation or {}}
    config = EngineConfig.model_validate(settings)
    runner = cast(ModelRunner, timed or _Timed())
    drafter = cast(ModelRunner, draft) if draft else runner
    with patch.object(profiling, "time", getattr(timed, "clock", _Clock())):
        return profile_at_start(config, runner, drafter, cast(KVCache, _Cache(block_size)), longest)


def test_one_sequence_is_measured_with_draft_tokens_too() -> None:
    """Bug: if only one sequence may run, only one row was measured, so K draft tokens were
    believed to be free until they had been tried."""
    found = _profile(max_sequences=1)
    assert [rows for rows, _ in found.target] == list(ALONE)
    assert found.batches == {1: [(rows, 1.0 + 0.1 * rows) for rows in ALONE]}
    assert [sequences for sequences, _ in found.draft] == [1]
    assert found.padded == _Timed.padded


def test_a_slow_spell_inflates_no_size() -> None:
    """Bug: sizes were measured one after another, so a slow moment of the machine made a few look
    expensive, and K that needs them was not played until others were learnt."""
    found = _profile(timed=_Restless(), max_sequences=1)
    assert found.batches == {1: [(rows, 1.0 + 0.1 * rows) for rows in ALONE]}


def test_a_draft_step_is_one_of_a_chain() -> None:
    """Bug: where a proposal is one call, a single forward was taken for one step of it, which costs
    half as much: sixteen streams stayed at K = 1 where K = 4 gives 1.15 times the speed."""
    found = _profile(timed=_Chained(), max_sequences=16)
    assert dict(found.draft) == pytest.approx({1: 0.01, 4: 0.04, 16: 1.0 + 0.1 * 16})


def test_a_draft_step_on_a_device_is_one_of_a_captured_chain() -> None:
    """Bug: on CUDA, single forwards were timed, which include host time between them."""
    found = _profile(timed=_Captured(), max_sequences=16)
    assert dict(found.draft) == pytest.approx({1: 0.01, 4: 0.04, 16: 1.0 + 0.1 * 16})


@pytest.mark.parametrize("block_size", [1, 4, 17, 23])
def test_a_chain_has_room_for_all_its_draft_tokens(block_size: int) -> None:
    """Bug: with blocks that end where the chain's last forward does, such as size 4 with K up to 4,
    the last draft token had no slot, and no engine started."""
    for k in (2, 4, 5):
        adaptive = {"controller": {"kind": "adaptive", "k_max": k}}
        found = _profile(
            timed=_Chained(block_size), block_size=block_size, speculation=adaptive, max_sequences=1
        )
        assert dict(found.draft) == pytest.approx({1: 0.01})


def test_nothing_is_measured_that_cannot_happen() -> None:
    """Law: no forward exceeds the rows of a step or the number of sequences."""
    small = _profile(max_sequences=8, max_step_tokens=4)
    assert [rows for rows, _ in small.target] == [1, 2, 3, 4]
    assert set(small.batches) == {1, 2}
    usual = _profile(max_sequences=64, max_step_tokens=512)
    assert max(rows for rows, _ in usual.target) == 64
    assert set(usual.batches) == {1, 2, 4, 8, 16, 32, 64}


def test_large_batches_without_room_for_draft_tokens_are_measured() -> None:
    """Bug: sixteen sequences with one row each were measured, but not reported as such."""
    found = _profile(max_sequences=16, max_step_tokens=16).batches
    assert dict(found[16]) == pytest.approx({16: 1.0 + 0.1 * 16})
    assert set(found) == {1, 2, 4, 8, 16}


def test_every_row_is_another_token() -> None:
    """Bug: all rows were the same token, which is routed to the same experts, so a mixture's rows
    looked as cheap as a dense model's."""

    class Reading(_Timed):
        def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
            super().forward(segments)
            tokens = [token for segment in segments for token in segment.tokens]
            assert len(set(tokens)) == min(len(tokens), 100)
            first_tokens.append(tokens[0])

    first_tokens: list[int] = []
    _profile(timed=Reading(), max_sequences=16)
    assert len(set(first_tokens)) > 50


def test_batches_are_measured_up_to_the_longest_proposals() -> None:
    """Bug: sixteen sequences were measured with at most five rows each. Beyond that, where cost
    grows by tiles, the last step was taken for the slope, and rows looked too expensive."""
    assert max(rows for rows, _ in _profile(max_sequences=16).batches[16]) == 16 * 9
    short = _profile(max_sequences=16, speculation={"controller": {"k_max": 2}})
    assert max(rows for rows, _ in short.batches[16]) == 16 * 3


def test_the_cost_of_context_is_measured() -> None:
    """Law: for target and drafter, if sequences may become that long."""
    found = _profile(max_sequences=8).token_seconds
    assert set(found) == {1, 4}
    assert [found[n] for n in (1, 4)] == [pytest.approx((_TOKEN, _TOKEN))] * 2
    assert not _profile(longest=200, max_sequences=8).token_seconds


def test_a_windowed_draft_pays_for_its_window_only() -> None:
    """Law: with a longer context it reads more of its window only, not of the context; if the
    window is no longer than the short context, nothing more."""

    class Windowed(_Timed):
        def __init__(self, tokens: int) -> None:
            self.window, self._tokens = Window(tokens, 16), tokens

        def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
            super().forward([s._replace(start=min(s.start, self._tokens)) for s in segments])

    for tokens, token in ((128, _TOKEN), (40, 0.0)):
        found = _profile(draft=Windowed(tokens), max_sequences=1)
        assert found.token_seconds[1] == pytest.approx((_TOKEN, token))
        assert found.draft_window == tokens
    assert _profile(max_sequences=1).draft_window == math.inf


def test_context_may_cost_more_in_large_batches() -> None:
    """Bug: the cost per token of sixteen sequences was also assumed for one and four, which pay
    half or a third of it."""
    found = _profile(timed=_Crowded(), max_sequences=16).token_seconds
    assert {n: target for n, (target, _) in found.items()} == pytest.approx(
        {1: _TOKEN, 4: _TOKEN, 16: 3 * _TOKEN}
    )


def test_draft_tokens_are_measured_after_drafting() -> None:
    """Bug: forwards were timed back to back, with warm CPU caches. In a step, drafting runs before:
    forwards with draft tokens then took a tenth to a half longer than the profile said, those
    without took as long as it said."""
    target = _Swept()
    found = _profile(200, timed=target, draft=target.sweeper, max_sequences=1)
    drafted = [(rows, 1.5 + 0.1 * rows) for rows in ALONE[1:]]
    assert found.batches == {1: [(1, pytest.approx(1.1)), *drafted]}
    settled, alone = 2, (1 + ALIKE) * TURNS  # a row is timed after others alike
    behind = {(rows, rows - 1): TURNS for rows in ALONE[1:]}
    assert target.drafted == {(1, 0): settled + alone} | behind


@pytest.mark.parametrize("every", [False, True])
def test_a_step_without_draft_tokens_is_timed_as_it_is_served(every: bool) -> None:
    """Bug: with Medusa, each timed forward stored hidden states, as no step at K = 0 does: K = 0
    looked up to 5 % dearer. With EAGLE, which needs those of every row, each step stores them."""

    class Storing(_Timed):
        every_state = every

        def forward(self, segments: Sequence[Segment], *, states: bool = True) -> None:
            super().forward(segments)
            self.seconds += 0.5 if states else 0.0

    found = _profile(timed=Storing(), draft=_Timed(), max_sequences=4)
    one = 1.6 if every else 1.1
    assert found.batches[1] == [(1, one), *((rows, 1.5 + 0.1 * rows) for rows in ALONE[1:])]
    assert dict(found.batches[4])[4] == pytest.approx(one + 0.3)


def test_sequences_are_far_apart() -> None:
    """Bug: side by side in memory, sixteen sequences took half the time they take as a pool places
    them. Law: none shares a block with another."""
    target = _Placed()
    _profile(timed=target, max_sequences=16)
    assert target.least == {n: len(_Cache.blocks) // n for n in (1, 2, 4, 8, 16)}


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, TURNS), (2e-3, LEAST_TURNS)])
def test_a_slow_machine_takes_fewer_turns(seconds: float, turns: int) -> None:
    """Law: start takes at most two passes over all sizes, or a tenth of a second per number of
    sequences, whichever is longer."""
    target = _Slow(seconds)
    _profile(200, timed=target, draft=_Timed(), max_sequences=1)
    assert target.counts[max(ALONE)] == turns


def test_slow_targets_are_timed_without_the_drafter() -> None:
    """Bug: a target with forwards of 0.4 s was profiled with all of its drafter's forwards before
    each: 43 s at start instead of 27."""
    target, drafter = _Slow(SWEEPS_SECONDS), _Sweeper()
    _profile(200, timed=target, draft=drafter, max_sequences=1)
    assert target.counts[1] <= TURNS + LEAST_TURNS
    assert not drafter.drafted
    quick, drafter = _Timed(), _Sweeper()
    _profile(200, timed=quick, draft=drafter, max_sequences=1)
    assert drafter.drafted


@pytest.mark.parametrize(
    ("dtype", "length", "block_size"),
    [("float32", 12, 16), ("bfloat16", 12, 16), ("bfloat16", 2, 16), ("float32", 2, 1),
     ("bfloat16", 12, 2)],
)  # fmt: skip
def test_an_engine_for_the_shortest_sequences_starts(
    dtype: str, length: int, block_size: int, tmp_path: Path
) -> None:
    """Bug: the profile, the proof or the warm-up ran more tokens than the compiled decoder had
    rotary angles for or a short block holds, and the engine died of an assertion."""
    pair = []
    for role, layers in (("target", 2), ("draft", 1)):
        shape = tiny.GROUPED | {"head_dim": 32, "num_hidden_layers": layers}
        model = tiny.build(LlamaForCausalLM, LlamaConfig(**shape)).to(getattr(torch, dtype))
        pair.append(tiny.save(model, tmp_path / role))
    config = {
        "target": {"path": pair[0], "max_model_len": length},
        "device": "cpu",
        "speculation": {"proposer": {"kind": "draft_model", "path": pair[1]}},
        "cache": {"num_blocks": 64, "block_size": block_size},
    }
    engine = Engine(EngineConfig.model_validate(config))
    params = SamplingParams(seed=1, max_tokens=length - 1, ignore_eos=True)
    engine.add(Submit("a", [5], params, 0.0))
    found = []
    while engine.has_work:
        found += engine.step().items
    assert sum(len(output.tokens) for output in found) == length - 1
    assert found[-1].finish == "length"


def test_rotary_tables_cover_the_profile() -> None:
    """Law: the tables cover the profile, since compiled code checks no bounds."""
    assert LENGTH <= SHORTEST_TABLE
    assert CONTEXT + max(ALONE) <= SHORTEST_TABLE
    assert CONTEXT + max(rows for _, lengths in BATCHES for rows in lengths) <= SHORTEST_TABLE
