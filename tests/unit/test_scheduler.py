"""The scheduler: who runs, how K is clipped, who is preempted, and that each request ends once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest

from engine.config import ScheduleConfig
from engine.messages import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import MOST_SCORED, Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan
from tests.support.audit import audit

SIZE = 4


def sequence(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 8,
    prompt_logprobs: int | None = None,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    number: int = 0,
) -> Sequence:
    params = SamplingParams(
        seed=0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, priority=priority
    )
    return Sequence(
        id=name, params=params, tokens=list(tokens), num_prompt=len(tokens), number=number,
        tenant=tenant, weight=weight,
    )  # fmt: skip


def scheduler_of(
    *,
    blocks: int = 64,
    budget: int = 64,
    sequences: int = 8,
    max_model_len: int = 10_000,
    prefix_caching: bool = True,
    own: Collection[int] | None = None,
) -> Scheduler:
    pool = BlockPool(blocks, SIZE, prefix_caching=prefix_caching, blocks=own)
    config = ScheduleConfig(max_step_tokens=budget, max_sequences=sequences)
    return Scheduler(config, pool, max_model_len=max_model_len)


def k_of(k: int) -> Callable[[Sequence], int]:
    """Return a function that gives every sequence `k` draft tokens."""
    return lambda seq: k


def run(scheduler: Scheduler, plan: StepPlan, *, accepted: int = 0) -> None:
    """Commit a plan: every sampling chunk keeps up to `accepted` draft tokens, plus one token."""
    for chunk in plan.chunks:
        if chunk.samples:
            kept = min(accepted, chunk.k)
            chunk.seq.num_draft_computed = chunk.end
            scheduler.commit(chunk, [7] * (kept + 1), kept)
        else:
            chunk.seq.num_draft_computed = chunk.end
            scheduler.commit(chunk, [], 0)
    audit(scheduler)


def shape(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    return [(c.seq.id, c.start, c.length, c.k) for c in plan.chunks]


def test_a_prompt_is_computed_in_chunks_and_samples_at_its_end() -> None:
    scheduler = scheduler_of(budget=8)
    scheduler.add(sequence("a", list(range(20))))
    plans = []
    for _ in range(4):
        plans.append(scheduler.schedule(k_of(2)))
        run(scheduler, plans[-1])
    assert [shape(p) for p in plans] == [
        [("a", 0, 8, 0)],
        [("a", 8, 8, 0)],
        [("a", 16, 4, 2)],
        [("a", 20, 1, 2)],
    ]


def test_decoding_comes_before_prompts() -> None:
    """Law: a long prompt does not starve decoding sequences."""
    scheduler = scheduler_of(budget=8)
    scheduler.add(sequence("a", [1]))
    run(scheduler, scheduler.schedule(k_of(0)))
    scheduler.add(sequence("b", list(range(100, 130))))
    for _ in range(3):
        plan = scheduler.schedule(k_of(0))
        assert [(c.seq.id, c.length) for c in plan.chunks] == [("a", 1), ("b", 7)]
        run(scheduler, plan)


def test_draft_tokens_do_not_starve_prompts() -> None:
    """Law: while a prompt waits, draft tokens leave it a quarter of the rows."""
    scheduler = scheduler_of(budget=16)
    for name in "abcd":
        scheduler.add(sequence(name, [ord(name)], max_tokens=50))
    run(scheduler, scheduler.schedule(k_of(0)))
    assert [c.k for c in scheduler.schedule(k_of(8)).chunks] == [3, 3, 3, 3]
    scheduler.add(sequence("e", list(range(40))))
    plan = scheduler.schedule(k_of(8))
    assert shape(plan)[-1] == ("e", 0, 4, 0)
    assert sum(c.length + c.k for c in plan.chunks) == 16


def test_rows_that_one_sequence_leaves_go_to_the_next() -> None:
    scheduler = scheduler_of(budget=12)
    for name in "ab":
        scheduler.add(sequence(name, [ord(name)], max_tokens=50))
    run(scheduler, scheduler.schedule(k_of(0)))
    plan = scheduler.schedule(lambda seq: {"a": 1, "b": 9}.get(seq.id, 0))
    assert [c.k for c in plan.chunks] == [1, 9]


@pytest.mark.parametrize(("max_tokens", "k"), [(1, 0), (2, 1), (5, 4), (9, 6)])
def test_k_never_exceeds_the_tokens_that_can_be_kept(max_tokens: int, k: int) -> None:
    """Law: the last token is always the target's, so at most `remaining - 1` draft tokens are
    kept."""
    scheduler = scheduler_of()
    scheduler.add(sequence("a", [1, 2], max_tokens=max_tokens))
    assert scheduler.schedule(k_of(6)).chunks[0].k == k


def test_k_respects_the_models_length() -> None:
    scheduler = scheduler_of(max_model_len=10)
    scheduler.add(sequence("a", list(range(7)), max_tokens=50))
    plan = scheduler.schedule(k_of(6))
    assert plan.chunks[0].k == 2
    run(scheduler, plan, accepted=2)
    assert scheduler.room(scheduler.running[0]) == 0


def test_k_shrinks_before_anyone_is_preempted() -> None:
    scheduler = scheduler_of(blocks=4)
    scheduler.add(sequence("a", [1] * 6, max_tokens=50))
    scheduler.add(sequence("b", [2] * 3, max_tokens=50))
    run(scheduler, scheduler.schedule(k_of(0)))
    plan = scheduler.schedule(k_of(8))
    assert not plan.preempted
    # a: 7 tokens in 2 blocks, 5 more positions up to the fourth block; b: 4 tokens in its block.
    assert shape(plan) == [("a", 6, 1, 5), ("b", 3, 1, 0)]


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    """Law: a preempted sequence waits at the head and finds its prefix in the prefix cache."""
    scheduler = scheduler_of(blocks=5)
    young, queued = sequence("b", [2] * 7, max_tokens=9), sequence("c", [3] * 12)
    scheduler.add(sequence("a", [1] * 7, max_tokens=10))
    scheduler.add(young)
    for _ in range(2):
        run(scheduler, scheduler.schedule(k_of(0)))
    scheduler.add(queued)
    while not (plan := scheduler.schedule(k_of(0))).preempted:
        run(scheduler, plan)
    assert plan.preempted == [young]
    assert (young.status, young.num_computed, [*young.blocks]) == ("waiting", 0, [])
    assert list(scheduler.waiting) == [young, queued]
    run(scheduler, plan)
    scheduler.abort(["a"])
    plan = scheduler.schedule(k_of(0))
    assert plan.admitted[0] is young
    assert young.num_computed > 0
    assert young.cached_tokens == 0, "recorded at the first admission"


def test_a_lower_priority_number_is_served_earlier() -> None:
    """Law: admission is by priority, then by arrival; negative priorities are allowed."""
    scheduler = scheduler_of(sequences=2)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1), ("f", 5)):
        scheduler.add(sequence(name, [ord(name)], max_tokens=1, priority=priority))
    order = []
    while scheduler.waiting:
        plan = scheduler.schedule(k_of(0))
        order += [seq.id for seq in plan.admitted]
        for seq in plan.admitted:
            scheduler.finish(seq, "length")
    assert order == ["c", "e", "a", "d", "b", "f"]


def test_the_least_important_gives_way_even_if_it_came_first() -> None:
    """Law: it resumes before others of its priority and after those of higher priority."""
    scheduler = scheduler_of(blocks=5)
    low = sequence("a", [1] * 7, max_tokens=10, priority=3)
    scheduler.add(low)
    run(scheduler, scheduler.schedule(k_of(0)))
    scheduler.add(sequence("b", [2] * 7, max_tokens=9))
    run(scheduler, scheduler.schedule(k_of(0)))
    queued = [sequence(n, [3] * 12, priority=p) for n, p in (("c", 3), ("d", 0), ("e", 4))]
    for seq in queued:
        scheduler.add(seq)
    while not (plan := scheduler.schedule(k_of(0))).preempted:
        run(scheduler, plan)
    assert plan.preempted == [low]
    assert [seq.id for seq in scheduler.waiting] == ["d", "a", "c", "e"]
    assert [chunk.seq.id for chunk in plan.chunks] == ["b"]


@pytest.mark.parametrize("length", [1, 10, 20])
def test_a_prompt_alone_is_computed_and_nothing_more(length: int) -> None:
    """Law: with max_tokens 0 there are no draft tokens, and the prompt may fill the model's
    length."""
    scheduler = scheduler_of(budget=8, max_model_len=20)
    seq = sequence("a", list(range(length)), max_tokens=0)
    scheduler.add(seq)
    while not (chunk := scheduler.schedule(k_of(4)).chunks[0]).samples:
        chunk.seq.num_draft_computed = 0
        scheduler.commit(chunk, [], 0)
    assert chunk.k == 0
    assert chunk.end == length
    scheduler.finish(seq, "length")
    audit(scheduler)


def test_a_sequence_that_can_never_fit_still_ends() -> None:
    """Law: alone in a small pool, a sequence runs until the pool is full, then has no room left."""
    scheduler = scheduler_of(blocks=3)
    seq = sequence("a", [1] * 5, max_tokens=1000)
    scheduler.add(seq)
    while scheduler.room(seq):
        run(scheduler, scheduler.schedule(k_of(4)), accepted=4)
    assert seq.num_tokens == 12
    scheduler.finish(seq, "length")
    audit(scheduler)
    assert scheduler.pool.num_used == 0


def test_admission_waits_for_the_whole_prompt() -> None:
    scheduler = scheduler_of(blocks=4, budget=4)
    scheduler.add(sequence("a", [1] * 9, max_tokens=50))
    scheduler.add(sequence("b", [2] * 5))
    plan = scheduler.schedule(k_of(0))
    run(scheduler, plan)
    assert [s.id for s in scheduler.waiting] == ["b"]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    """Law: without that block, an older sequence's next token would preempt the newcomer."""
    scheduler = scheduler_of(blocks=4)
    scheduler.add(sequence("a", [1] * 3, max_tokens=50))
    run(scheduler, scheduler.schedule(k_of(0)))
    scheduler.add(sequence("b", [2] * 12))
    assert not scheduler.schedule(k_of(0)).admitted
    scheduler.abort(["b"])
    scheduler.add(sequence("c", [3] * 8))
    assert [seq.id for seq in scheduler.schedule(k_of(0)).admitted] == ["c"]


class Counted(list[int]):
    """A list that counts how many of its tokens were read in slices."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 0
        return found


def test_a_long_text_that_waits_for_blocks_is_not_looked_up_in_every_step() -> None:
    """Bug: each step compared all cached blocks of the next text to admit: with 32,000 tokens for
    up to 2 ms."""
    scheduler = scheduler_of(blocks=16)
    scheduler.add(sequence("a", list(range(16))))
    run(scheduler, scheduler.schedule(k_of(0)))
    scheduler.abort(["a"])
    scheduler.add(sequence("b", list(range(100, 148)), max_tokens=9))
    run(scheduler, scheduler.schedule(k_of(0)))
    waits = sequence("c", list(range(17)))
    waits.tokens = tokens = Counted(waits.tokens)
    scheduler.add(waits)
    reads = []
    while waits.status == "waiting":
        run(scheduler, scheduler.schedule(k_of(0)))
        reads.append(tokens.read)
        if len(reads) == 4:
            scheduler.abort(["b"])
    assert reads[0] == reads[3] > 16
    assert len(reads) == 5
    assert waits.cached_tokens


def test_a_waiting_text_needs_less_while_another_one_computes_it() -> None:
    """Law: a text that did not fit is admitted as soon as enough of it is in blocks of others."""
    scheduler = scheduler_of(blocks=14, budget=8)
    first, copy = (sequence(name, list(range(40)), tenant=name) for name in "ab")
    scheduler.add(first)
    run(scheduler, scheduler.schedule(k_of(0)))
    scheduler.add(copy)
    computed = []
    while copy.status == "waiting":
        computed.append(first.num_computed)
        run(scheduler, scheduler.schedule(k_of(0)))
    assert computed == [8, 16, 24, 32]
    assert copy.cached_tokens == 32


def test_copies_of_one_prompt_share_its_blocks_in_the_same_step() -> None:
    """Law: blocks are published when planned, which makes n > 1 cheap."""
    scheduler = scheduler_of(budget=64)
    for name in "abc":
        scheduler.add(sequence(name, list(range(18))))
    plan = scheduler.schedule(k_of(0))
    assert [(c.start, c.length) for c in plan.chunks] == [(0, 18), (16, 2), (16, 2)]
    tables = [c.seq.blocks for c in plan.chunks]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    assert [c.seq.cached_tokens for c in plan.chunks] == [0, 16, 16]
    run(scheduler, plan)


def test_a_step_scores_as_many_rows_as_the_memory_plan_has() -> None:
    """Bug: with large steps, logits of all rows of scored prompts were beyond the memory plan. Rows
    of other prompts are not limited, and every scored prompt is computed in the end."""
    scheduler = scheduler_of(blocks=1000, budget=4 * MOST_SCORED)
    scheduler.add(sequence("plain", list(range(2 * MOST_SCORED))))
    for name in "abc":
        scheduler.add(sequence(name, list(range(MOST_SCORED - 100)), prompt_logprobs=0))
    rows = list[dict[str, int]]()
    while any(not seq.num_output for seq in (*scheduler.running, *scheduler.waiting)):
        plan = scheduler.schedule(k_of(0))
        rows.append({chunk.seq.id: chunk.length for chunk in plan.chunks if chunk.seq.is_scored})
        assert sum(rows[-1].values()) <= MOST_SCORED
        assert len(rows) > 1 or plan.chunks[0].length == 2 * MOST_SCORED
        run(scheduler, plan)
    assert Counter(name for each in rows for name in each) == {"a": 1, "b": 2, "c": 2}


def test_prompt_logprobs_compute_every_row() -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence("a", list(range(18))))
    scheduler.add(sequence("b", list(range(18)), prompt_logprobs=0))
    plan = scheduler.schedule(k_of(0))
    assert [(c.start, c.length) for c in plan.chunks] == [(0, 18), (0, 18)]
    run(scheduler, plan)


def test_generated_blocks_are_shared_too() -> None:
    """Law: the next turn of a conversation finds the reply in the prefix cache."""
    scheduler = scheduler_of()
    seq = sequence("a", [1, 2, 3], max_tokens=10)
    scheduler.add(seq)
    while scheduler.room(seq):
        run(scheduler, scheduler.schedule(k_of(3)), accepted=2)
    scheduler.finish(seq, "length")
    scheduler.add(sequence("b", [*seq.tokens, 50]))
    assert scheduler.schedule(k_of(0)).chunks[0].start == 12


def test_a_hit_counts_for_the_drafter_only_where_its_plane_was_filled() -> None:
    scheduler = scheduler_of()
    seq = sequence("a", list(range(17)), max_tokens=1)
    scheduler.add(seq)
    (chunk,) = scheduler.schedule(k_of(0)).chunks
    chunk.seq.num_draft_computed = 9
    scheduler.commit(chunk, [7], 0)
    scheduler.finish(seq, "length")
    again = sequence("b", list(range(17)))
    scheduler.add(again)
    scheduler.schedule(k_of(0))
    assert (again.num_computed, again.num_draft_computed) == (16, 8)


def test_rejected_positions_are_not_valid_for_the_drafter() -> None:
    """Law: unless the caller sets it, the draft's own count is cut at what was accepted."""
    scheduler = scheduler_of()
    seq = sequence("a", [1, 2, 3])
    scheduler.add(seq)
    (chunk,) = scheduler.schedule(k_of(4)).chunks
    seq.num_draft_computed = 6
    scheduler.commit(chunk, [8, 9], 1)
    assert (seq.num_computed, seq.num_draft_computed) == (4, 4)


def test_unused_blocks_go_back_at_commit() -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence("a", [1, 2, 3], max_tokens=50))
    plan = scheduler.schedule(k_of(12))
    assert scheduler.pool.num_used == 4
    run(scheduler, plan)
    assert scheduler.pool.num_used == 1


def test_abort_ends_waiting_and_running_and_ignores_unknown_ids() -> None:
    scheduler = scheduler_of(sequences=1)
    for name in "ab":
        scheduler.add(sequence(name, [1, 2, 3]))
    run(scheduler, scheduler.schedule(k_of(0)))
    gone = scheduler.abort(["b", "a", "nobody"])
    assert {s.id for s in gone} == {"a", "b"}
    assert {s.finish for s in gone} == {"abort"}
    assert scheduler.pool.num_used == 0
    assert not scheduler.schedule(k_of(0)).chunks


def test_more_sequences_than_rows_take_turns_by_admission() -> None:
    """Law: each running sequence gets a row in every step, so no more run than there are rows."""
    scheduler = scheduler_of(budget=3, sequences=8)
    for name in "abcde":
        scheduler.add(sequence(name, [ord(name)], max_tokens=2))
    run(scheduler, scheduler.schedule(k_of(0)))
    plan = scheduler.schedule(k_of(5))
    assert shape(plan) == [(name, 1, 1, 0) for name in "abc"]


class Walk:
    """Random operations on one scheduler, and the invariants after each."""

    def __init__(
        self,
        seed: int,
        *,
        blocks: int,
        budget: int,
        prefix_caching: bool = True,
        own: Collection[int] | None = None,
        num_tenants: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.num_tenants = num_tenants
        self.budget = budget
        self.scheduler = scheduler_of(
            blocks=blocks, budget=budget, sequences=6, prefix_caching=prefix_caching, own=own
        )
        self.ended: Counter[str] = Counter()
        self.were_passed = False
        self.num_added = self.num_preempted = self.num_cached = 0
        self.kv = [[-1] * SIZE for _ in range(blocks)]  # the token whose key is in each slot

    def add(self) -> None:
        """Add a prompt that often shares a prefix with others and may need too many blocks."""
        length = self.random.randint(1, 30)
        shared = self.random.randint(0, length)
        family = self.random.randint(0, 2)
        tokens = [family] * shared + [self.random.randint(0, 3) for _ in range(length - shared)]
        self.num_added += 1
        seq = sequence(
            str(self.num_added),
            tokens,
            max_tokens=self.random.choice([0, 1, 2, 7, 20, 500]),
            prompt_logprobs=self.random.choice([None, None, None, 0]),
            priority=self.random.choice([0, 0, 0, 0, -1, 2]),
            tenant="aabc"[self.num_added % self.num_tenants],
            number=self.num_added,
        )
        self.scheduler.add(seq)

    def abort(self) -> None:
        alive = [s.id for s in (*self.scheduler.running, *self.scheduler.waiting)]
        chosen = self.random.sample(alive, min(len(alive), self.random.randint(0, 2)))
        self.ended.update(s.id for s in self.scheduler.abort([*chosen, "unknown"]))

    def step(self) -> None:
        k = self.random.choice([0, 0, 1, 3, 8])
        had_work = bool(self.scheduler.running or self.scheduler.waiting)
        decoding = [s for s in self.scheduler.running if s.num_tokens - s.num_computed == 1]
        plan = self.scheduler.schedule(lambda _seq: k)
        assert bool(plan.chunks) == had_work, "no step passes without progress"
        self.check(plan, decoding)
        self.forward(plan)
        for chunk in plan.chunks:
            self.commit(chunk)

    def check(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        """Check that the budget holds, each block has one writer, reads are covered, and decoding
        is skipped only for one step of another tenant's newly admitted sequence."""
        assert sum(c.length + c.k for c in plan.chunks) <= self.budget
        self.num_preempted += len(plan.preempted)
        planned = [c.seq for c in plan.chunks]
        assert len({id(s) for s in planned}) == len(planned)
        passed = [s for s in decoding if not (s in planned or s in plan.preempted)]
        if passed:
            assert self.num_tenants > 1
            assert not self.were_passed
            [first] = plan.admitted
            assert planned == [first]
            assert first.tenant not in {s.tenant for s in passed}
        self.were_passed = bool(passed)
        writers: Counter[int] = Counter()
        for chunk in plan.chunks:
            assert chunk.length >= 1
            assert chunk.start == chunk.seq.num_computed
            assert chunk.k == 0 or chunk.samples
            last = (chunk.end + chunk.k - 1) // SIZE
            writers.update(chunk.seq.blocks[chunk.start // SIZE : last + 1])
            assert last < len(chunk.seq.blocks)
        assert not [block for block, count in writers.items() if count > 1]
        self.num_cached += sum(s.num_computed for s in plan.admitted)

    def write(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            self.kv[seq.blocks[position // SIZE]][position % SIZE] = token

    def forward(self, plan: StepPlan) -> None:
        """Act as a layer: all chunks write their keys, draft tokens too, then each reads its
        own."""
        for chunk in plan.chunks:
            self.write(chunk.seq, chunk.start, chunk.seq.tokens[chunk.start : chunk.end])
            self.write(chunk.seq, chunk.end, [-2] * chunk.k)
        for chunk in plan.chunks:
            read = [token for block in chunk.seq.blocks for token in self.kv[block]]
            assert read[: chunk.end] == chunk.seq.tokens[: chunk.end]

    def commit(self, chunk: Chunk) -> None:
        seq = chunk.seq
        if not chunk.samples:
            chunk.seq.num_draft_computed = chunk.end
            self.scheduler.commit(chunk, [], 0)
            return
        room = self.scheduler.room(seq)
        accepted = self.random.randint(0, chunk.k)
        tokens = [self.random.randint(0, 3) for _ in range(accepted + 1)][:room]
        stopped = room > 0 and self.random.random() < 0.03
        if stopped:
            tokens = tokens[: self.random.randint(1, len(tokens))]
        self.write(seq, chunk.end, tokens[:accepted])
        if tokens:
            chunk.seq.num_draft_computed = chunk.end
            self.scheduler.commit(chunk, tokens, min(accepted, len(tokens)))
        if stopped or not self.scheduler.room(seq):
            self.scheduler.finish(seq, "stop" if stopped else "length")
            self.ended[seq.id] += 1

    def walk(self, operations: int) -> None:
        for _ in range(operations):
            self.operate()
        self.drain()

    def operate(self) -> None:
        self.random.choices([self.add, self.abort, self.step], weights=[2, 0.3, 8])[0]()
        audit(self.scheduler)
        if len(self.scheduler.waiting) > 12:
            self.step()
            audit(self.scheduler)

    def drain(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            audit(self.scheduler)


@pytest.mark.parametrize("num_tenants", [1, 4])
@pytest.mark.parametrize(
    ("blocks", "budget", "prefix_caching"),
    [(9, 16, True), (9, 5, True), (24, 40, True), (9, 16, False)],
)
def test_ten_thousand_random_operations(
    blocks: int, budget: int, prefix_caching: bool, num_tenants: int
) -> None:
    """Law: after each operation the pool balances, no block has two writers, the budget holds and
    each sequence reads its own keys; in the end every request has ended exactly once and every
    block is free."""
    walk = Walk(
        blocks + budget, blocks=blocks, budget=budget, prefix_caching=prefix_caching,
        num_tenants=num_tenants,
    )  # fmt: skip
    walk.walk(10_000)
    assert walk.ended == Counter(str(i + 1) for i in range(walk.num_added))
    assert walk.num_added > 1000
    assert walk.num_preempted > 50, "the walk is meant to run out of blocks"
    assert (walk.num_cached > 1000) == prefix_caching
    assert walk.scheduler.pool.num_used == 0
    assert walk.scheduler.pool.num_free == blocks


def test_two_pools_of_one_memory_keep_out_of_each_others_blocks() -> None:
    """Law: if two pools own alternating blocks of one memory, each balances over its own blocks,
    and every sequence reads its own keys, whatever the other pool does."""
    owned = [[block for block in range(20) if block // 3 % 2 == turn] for turn in range(2)]
    assert [len(own) for own in owned] == [11, 9]
    walks = [Walk(seed, blocks=20, budget=16, own=own) for seed, own in enumerate(owned)]
    walks[1].kv = walks[0].kv
    for _ in range(5_000):
        for walk, own in zip(walks, owned, strict=True):
            walk.operate()
            held = [block for seq in walk.scheduler.running for block in seq.blocks]
            assert set(held) <= set(own)
    for walk, own in zip(walks, owned, strict=True):
        walk.drain()
        assert walk.ended == Counter(str(i + 1) for i in range(walk.num_added))
        assert walk.num_preempted > 50, "the walk is meant to run out of blocks"
        assert walk.num_cached > 1000
        assert walk.scheduler.pool.num_free == walk.scheduler.pool.num_total == len(own)
