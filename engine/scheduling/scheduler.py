"""Scheduler: plans which sequences run in a step, over which positions, with how many draft tokens.

One rule for all: computed positions catch up with tokens. Status, tokens, blocks and the target's
counts of a Sequence change only here and in the block pool: `schedule` plans, `commit` applies a
step's result, `finish` and `abort` end. Promises that decoding continues at least every other step,
that the budget holds, that tenants share fairly, and that every sequence can finish, however small
the pool. Decides what fits, not what pays: the controller chooses K.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from operator import attrgetter

from engine.config import ScheduleConfig
from engine.messages import FinishReason
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.fair_share import FairShare
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan

_DRAFT_HOLD = 4  # while prompts wait, draft tokens cannot use 1/4 of the budget
_OLDEST_TURN = 4  # every fourth admission takes the oldest request of any priority
MOST_SCORED = 512  # rows of a step for prompt log-probabilities: each has all its logits in memory
_number = attrgetter("number")


class Scheduler:
    """`waiting` is ordered by priority, then by arrival; `running` by priority, then by admission.
    So preemption takes the least important sequences, the youngest first. Among the most important
    waiting ones, the least served tenant is next; among the least important running ones, the
    tenant with the most blocks is preempted (`fair_share`)."""

    def __init__(self, config: ScheduleConfig, pool: BlockPool, *, max_model_len: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._shares = FairShare()
        self._tenants: Counter[str] = Counter()  # number of sequences
        self._num_passed = 0  # admissions in a row that were not the oldest request
        # The next to admit, if it did not fit the free blocks; the number of its cached blocks, and
        # how many blocks it needs unless more are cached.
        self._unfit: tuple[Sequence | None, int, int] = None, 0, 0
        self._was_first = False  # the last step ran one newly admitted sequence alone
        self.max_len = min(max_model_len, pool.capacity)
        self._budget = config.max_step_tokens
        self._scorable = MOST_SCORED  # rows left in this step
        self._max_running = min(config.max_sequences, config.max_step_tokens)

    # -- add and end -------------------------------------------------------------------------

    def room(self, seq: Sequence) -> int:
        """Return how many tokens `seq` may still generate: by max_tokens, by the model's length,
        and by the whole pool. At 0 it must be finished with `length`."""
        most = seq.params.max_tokens + seq.num_prompt
        return (most if most < self.max_len else self.max_len) - len(seq.tokens)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that fits, with room for a token unless max_tokens is 0."""
        assert seq.tokens
        assert self.room(seq) >= min(seq.params.max_tokens, 1)
        seq.status = "waiting"
        insort_right(self.waiting, seq, key=_priority)
        self._tenants[seq.tenant] += 1
        self._shares.arrive(seq)

    def mean_length(self) -> float:
        """Return the mean tokens of the running sequences; 0 if there are none."""
        running = self.running
        return sum([len(seq.tokens) for seq in running]) / len(running) if running else 0.0

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """End the sequences with these ids and return them. Unknown ids are ignored, since an abort
        may cross a finish on the wire."""
        wanted = set(ids)
        ended = [seq for seq in (*self.running, *self.waiting) if seq.id in wanted]
        for seq in ended:
            self.finish(seq, "abort")
        return ended

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence and release its blocks."""
        assert seq.status != "finished"
        if seq.status == "running":
            self.running.remove(seq)
        else:
            self._unqueue(seq)
        self._tenants -= Counter((seq.tenant,))
        self.pool.release(seq)
        seq.status = "finished"
        seq.finish = reason

    def forget_drafts(self) -> None:
        """Reset the draft counts: the drafter was replaced, and its KV plane is empty."""
        for seq in (*self.running, *self.waiting):
            seq.num_draft_computed = seq.num_draft_ready = 0
        self.pool.forget_drafts()

    # -- planning ----------------------------------------------------------------------------

    def schedule(self, want: Callable[[Sequence], int]) -> StepPlan:
        """Plan one step: decoding sequences, then those within their prompt, then waiting ones.

        `want(seq)`: how many draft tokens pay for a sequence; called once for each that will
        sample. The number is limited by the sequence's room, by the budget and by the free blocks.
        Preempted sequences return to the head of the queue.
        """
        plan, self._scorable = StepPlan(), MOST_SCORED
        if len(self._tenants) > 1 and self._admit_by_preemption(plan):
            self._was_first = True
            for seq in plan.admitted:
                self._extend(plan, seq, self._budget, want)
            return plan
        self._was_first = False
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self.running:
            (prompts if len(seq.tokens) - seq.num_computed > 1 else decoding).append(seq)
        left = self._decode(plan, decoding, len(prompts), want)
        for seq in prompts:
            if left and seq.status == "running":
                left -= self._extend(plan, seq, left, want)
        while left and self.waiting and not plan.preempted:
            seq = self._next()
            if (seq.is_scored and not self._scorable) or not self._admit(seq):
                break
            plan.admitted.append(seq)
            left -= self._extend(plan, seq, left, want)
        return plan

    def _next(self) -> Sequence:
        """Return the waiting sequence to admit next."""
        head, last = self.waiting[0], self.waiting[-1]
        if self._num_passed >= _OLDEST_TURN - 1 and _priority(head) != _priority(last):
            return min(self.waiting, key=_number)
        if len(self._tenants) == 1:
            return head
        most_important = _priority(head)
        return self._shares.first(
            takewhile(lambda seq: _priority(seq) == most_important, self.waiting)
        )

    def _admit_by_preemption(self, plan: StepPlan) -> bool:
        """If the next sequence has no room, preempt the youngest ones of tenants that run more than
        its own until it has room; then admit it before running sequences grow.

        Returns whether it runs alone in this step. It does if its tenant has nothing running while
        another has most of the batch: its TTFT must not depend on that batch's size. At most every
        other step, so that decoding is never starved."""
        is_full = len(self.running) >= self._max_running
        if not self.waiting:
            return False
        head = self._next()
        is_first = not self._was_first and self._shares.is_crowded_out(head, self.running)
        if not (is_full or is_first or head is self._unfit[0]):
            return False
        while not (fits := self._admit(head)):
            victim = self._shares.victim_for(head, self.running)
            if victim is None:
                break
            self._preempt(plan, victim)
        if fits:
            plan.admitted.append(head)
        return fits and is_first

    def _decode(
        self,
        plan: StepPlan,
        decoding: list[Sequence],
        num_prompts: int,
        want: Callable[[Sequence], int],
    ) -> int:
        """Plan one row each, and draft tokens from an even share of the rest; return the budget
        left."""
        queued = self.waiting and len(self.running) < self._max_running
        held = self._budget // _DRAFT_HOLD if num_prompts or queued else 0
        left, turns = self._budget, len(decoding)
        for seq in decoding:
            if seq.status == "running":  # else preempted for an earlier one in this plan
                share = max(1, (left - max(held, num_prompts)) // turns)
                left -= self._extend(plan, seq, share, want)
            turns -= 1
        return left

    def _extend(
        self, plan: StepPlan, seq: Sequence, budget: int, want: Callable[[Sequence], int]
    ) -> int:
        """Add a chunk of at most `budget` rows for a running sequence. Returns its rows."""
        start, total = seq.num_computed, len(seq.tokens)
        length = min(total - start, budget)
        if seq.is_scored:
            length = min(length, self._scorable)
            self._scorable -= length
            if not length:
                return 0
        end = start + length
        pool, size = self.pool, self.pool.block_size
        k = want(seq) if end == total else 0
        if k:
            k = max(min(k, budget - length, self.room(seq) - 1), 0)
        if end + k > len(seq.blocks) * size and not pool.reserve(seq, end + k):
            room = (len(seq.blocks) + pool.num_free) * size - end
            k = min(k, max(0, room))
            while not pool.reserve(seq, end + k):
                self._preempt(plan, self._victim_for(plan, seq))
                if seq.status != "running":
                    return 0
        # In a forward every layer writes all keys before it attends, so a sequence admitted later
        # in this plan may share these blocks.
        if end >= (seq.num_published + 1) * size:
            pool.publish(seq, end)
        plan.chunks.append(Chunk(seq, start, length, k))
        return length + k

    def _victim_for(self, plan: StepPlan, seq: Sequence) -> Sequence:
        """Return the sequence to preempt for `seq`: of the least important ones not in the plan,
        `seq` included, the youngest of the tenant with the most blocks, but `seq` itself last."""
        planned = {id(chunk.seq) for chunk in plan.chunks}
        candidates = [each for each in reversed(self.running) if id(each) not in planned]
        # A lone sequence always fits: none grows beyond the pool (`max_len`).
        assert planned or len(candidates) > 1
        least = _priority(candidates[0])
        candidates = [each for each in candidates if _priority(each) == least]
        if len(self._tenants) > 1:
            tenant = self._shares.holds_most(candidates, self.running)
            candidates = [each for each in candidates if each.tenant == tenant]
        return next((each for each in candidates if each is not seq), seq)

    def _preempt(self, plan: StepPlan, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.num_computed = seq.num_draft_computed = 0
        seq.status = "waiting"
        insort_left(self.waiting, seq, key=_priority)
        self._shares.arrive(seq)
        plan.preempted.append(seq)

    def _admit(self, seq: Sequence) -> bool:
        """Run a waiting sequence if all its tokens fit now, with one spare block for each running
        sequence, so that admission does not cause the next preemption. Returns whether it runs."""
        pool, size, (unfit, count, need) = self.pool, self.pool.block_size, self._unfit
        is_unfit = unfit is seq and need + len(self.running) > pool.num_free
        if len(self.running) >= self._max_running or (is_unfit and not pool.goes_on(seq, count)):
            return False  # a long text is not looked up in every step
        # Prompt logprobs need every prompt row, so they skip the prefix cache.
        cached = pool.match(seq) if seq.params.prompt_logprobs is None else []
        need = -(-len(seq.tokens) // size) - len(cached) + pool.num_idle(cached)
        if need + len(self.running) > pool.num_free:
            self._unfit = seq, len(cached), need
            return False
        self._unfit = None, 0, 0
        pool.adopt(seq, cached)
        fits = pool.reserve(seq, len(seq.tokens))
        assert fits
        seq.num_computed = len(cached) * size
        ready = 0
        while ready < len(cached) and pool.draft_ready(cached[ready]):
            ready += 1
        seq.num_draft_computed = ready * size
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.num_computed, seq.num_prompt)
            self._shares.charge(seq, len(seq.tokens) - seq.num_computed)
        if _priority(self.waiting[0]) != _priority(self.waiting[-1]):
            self._num_passed = 0 if seq is min(self.waiting, key=_number) else self._num_passed + 1
        seq.status = "running"
        self._unqueue(seq)
        insort_right(self.running, seq, key=_priority)
        return True

    def _unqueue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self._shares.leave(seq)

    # -- results -----------------------------------------------------------------------------

    def commit(
        self,
        chunk: Chunk,
        tokens: list[int],
        num_accepted: int,
        num_proposed: int = 0,
        num_predicted: int = 0,
    ) -> None:
        """Apply the result of one chunk, before anything else happens to its sequence.

        `tokens` are appended: accepted draft tokens and one more, already cut at a stop token and
        at `room`; none for a chunk that does not sample. The KV of `num_accepted` draft tokens
        follows the chunk in order. The drafter's KV is valid up to `num_draft_computed`, which the
        proposer sets, at most to the accepted tokens. `num_predicted`: of the proposed."""
        pool, size = self.pool, self.pool.block_size
        seq, start, length, _ = chunk
        assert seq.status == "running"
        assert seq.num_computed == start
        assert not tokens or start + length == len(seq.tokens)
        assert len(tokens) <= self.room(seq)
        seq.tokens += tokens
        if tokens:
            seq.rounds += 1
            seq.proposed += num_proposed
            seq.accepted += num_accepted
            seq.predicted += num_predicted
            if seq.tenant:
                self._shares.charge(seq, len(tokens))
        total, computed = len(seq.tokens), start + length + num_accepted
        seq.num_computed = computed = computed if computed < total else total - 1
        if seq.num_draft_computed > computed:
            seq.num_draft_computed = computed
        # Most steps fill no block: checking here is cheaper than the calls.
        if computed >= (seq.num_published + 1) * size:
            pool.publish(seq, computed)
        if seq.num_draft_computed >= (seq.num_draft_ready + 1) * size:
            pool.mark_draft_ready(seq, seq.num_draft_computed)
        if len(seq.blocks) * size >= total + size:
            pool.trim(seq, total)


def _priority(seq: Sequence) -> int:
    return seq.params.priority
