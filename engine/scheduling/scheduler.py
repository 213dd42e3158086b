"""Scheduler: who runs in the next step, over which positions, with how many guesses.

One rule: computed chases total. Owns every Sequence (queue, status, counts, blocks) and is the only
place where their state moves: `schedule` plans, `commit` takes a step's result, `finish` and
`abort` end. Promises that decoding goes on at least every other step, that the budget holds, that
tenants share what there is, and that every sequence can end, however small the pool. Answers what
fits, not what pays: K is the controller's.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import takewhile

from engine.config import ScheduleConfig
from engine.messages import FinishReason
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.fair_share import FairShare
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan

_DRAFT_HOLD = 4  # one row in this many is withheld from guesses while prompts wait
_OLDEST_TURN = 4  # one admission in this many is the oldest request's, whatever its priority


class Scheduler:
    """`waiting` is by priority, then first come, first served; `running` by priority, then in order
    of admission. So whoever gives way is the least important, and of those the youngest. Of the
    most important that wait, the tenant that was served least is next, and of those that run, the
    tenant that holds the most blocks gives way (`fair_share`)."""

    def __init__(self, config: ScheduleConfig, pool: BlockPool, *, max_model_len: int) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._shares = FairShare()
        self._tenants: Counter[str] = Counter()  # of all sequences
        self._num_passed = 0  # admissions in a row that passed the oldest over
        self._unfit: Sequence | None = None  # next, but there were no blocks for it
        self._was_first = False  # the last step was a newcomer's alone
        self.max_len = min(max_model_len, pool.capacity)
        self._budget = config.max_step_tokens
        self._max_running = min(config.max_sequences, config.max_step_tokens)

    # -- in and out --------------------------------------------------------------------------

    def room(self, seq: Sequence) -> int:
        """Tokens that `seq` may still generate: by max_tokens, by the model's length, and by the
        whole pool. At 0 it must be finished with `length`."""
        most = seq.params.max_tokens + seq.num_prompt
        return (most if most < self.max_len else self.max_len) - len(seq.tokens)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that fits, with room for a token unless it wants none."""
        assert seq.tokens
        assert self.room(seq) >= min(seq.params.max_tokens, 1)
        seq.status = "waiting"
        insort_right(self.waiting, seq, key=_priority)
        self._tenants[seq.tenant] += 1
        self._shares.arrive(seq)

    def mean_length(self) -> float:
        """Tokens of a running sequence; 0 if there is none."""
        running = self.running
        return sum([len(seq.tokens) for seq in running]) / len(running) if running else 0.0

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """End the sequences with these ids; unknown ones are ignored, since an abort may cross a
        finish on the wire."""
        wanted = set(ids)
        found = [seq for seq in (*self.running, *self.waiting) if seq.id in wanted]
        for seq in found:
            self.finish(seq, "abort")
        return found

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence and give its blocks back."""
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
        """Another drafter has computed nothing of what there is."""
        for seq in (*self.running, *self.waiting):
            seq.num_draft_computed = seq.num_draft_ready = 0
        self.pool.forget_drafts()

    # -- planning ----------------------------------------------------------------------------

    def schedule(self, want: Callable[[Sequence], int]) -> StepPlan:
        """Plan one step: decoding sequences, then those amid their prompt, then waiting ones.

        `want` says how many guesses pay for a sequence, and is asked once for each that will
        sample; they are clipped by what may be kept, by the budget and by the free blocks.
        Preempted sequences are queued again, at the head.
        """
        plan = StepPlan()
        if len(self._tenants) > 1 and self._make_way(plan):
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
            if not self._admit(seq):
                break
            plan.admitted.append(seq)
            left -= self._extend(plan, seq, left, want)
        return plan

    def _next(self) -> Sequence:
        """Who is to be admitted next, of those that wait."""
        head, last = self.waiting[0], self.waiting[-1]
        if self._num_passed >= _OLDEST_TURN - 1 and _priority(head) != _priority(last):
            return min(self.waiting, key=_number)
        if len(self._tenants) == 1:
            return head
        most_important = _priority(head)
        return self._shares.first(
            takewhile(lambda seq: _priority(seq) == most_important, self.waiting)
        )

    def _make_way(self, plan: StepPlan) -> bool:
        """Where there is no room for who is next, the youngest of those tenants that have more
        running than its own give way until there is; then it is admitted ahead of all growth.

        Returns whether it is to have this step for itself. So it is where its tenant has nothing
        running and another one has most of the batch, whose size must not tell in the time to the
        first token; at most every other step, since decoding never starves."""
        unfit, self._unfit = self._unfit, None
        is_full = len(self.running) >= self._max_running
        if not self.waiting:
            return False
        head = self._next()
        is_first = not self._was_first and self._shares.is_crowded_out(head, self.running)
        if not (is_full or is_first or head is unfit):
            return False
        while not (fits := self._admit(head)):
            loser = self._shares.gives_way(head, self.running)
            if loser is None:
                break
            self._preempt(plan, loser)
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
        """One row each, and guesses from an even share of the rest; the budget that is left."""
        queued = self.waiting and len(self.running) < self._max_running
        held = self._budget // _DRAFT_HOLD if num_prompts or queued else 0
        left, turns = self._budget, len(decoding)
        for seq in decoding:
            if seq.status == "running":  # else preempted by one that came before it in this plan
                share = max(1, (left - max(held, num_prompts)) // turns)
                left -= self._extend(plan, seq, share, want)
            turns -= 1
        return left

    def _extend(
        self, plan: StepPlan, seq: Sequence, budget: int, want: Callable[[Sequence], int]
    ) -> int:
        """Add a chunk of at most `budget` rows for a running sequence; the rows it uses."""
        start, total = seq.num_computed, len(seq.tokens)
        length = min(total - start, budget)
        end = start + length
        pool, size = self.pool, self.pool.block_size
        k = want(seq) if end == total else 0
        if k:
            k = max(min(k, budget - length, self.room(seq) - 1), 0)
        if end + k > len(seq.blocks) * size and not pool.reserve(seq, end + k):
            room = (len(seq.blocks) + pool.num_free) * size - end
            k = min(k, max(0, room))
            while not pool.reserve(seq, end + k):
                self._preempt(plan, self._gives_way(plan, seq))
                if seq.status != "running":
                    return 0
        # Within one forward every layer writes its keys before anyone attends, so a sequence
        # admitted later in this very plan may share these blocks.
        if end >= (seq.num_published + 1) * size:
            pool.publish(seq, end)
        plan.chunks.append(Chunk(seq, start, length, k))
        return length + k

    def _gives_way(self, plan: StepPlan, seq: Sequence) -> Sequence:
        """Who gives way to `seq`: of the least important of those that are not in the plan, it
        among them, one of the tenant that holds the most blocks; the youngest but for `seq`."""
        planned = {id(chunk.seq) for chunk in plan.chunks}
        able = [one for one in reversed(self.running) if id(one) not in planned]
        # Alone, it would fit: no sequence grows beyond the pool (`max_len`).
        assert planned or len(able) > 1
        least = _priority(able[0])
        able = [one for one in able if _priority(one) == least]
        if len(self._tenants) > 1:
            tenant = self._shares.holds_most(able, self.running)
            able = [one for one in able if one.tenant == tenant]
        return next((one for one in able if one is not seq), seq)

    def _preempt(self, plan: StepPlan, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.num_computed = seq.num_draft_computed = 0
        seq.status = "waiting"
        insort_left(self.waiting, seq, key=_priority)
        self._shares.arrive(seq)
        plan.preempted.append(seq)

    def _admit(self, seq: Sequence) -> bool:
        """Let a waiting sequence run if all of its tokens fit now, with a block to spare for each
        running sequence, so that admission does not bring about the next preemption."""
        if len(self.running) >= self._max_running:
            return False
        pool, size = self.pool, self.pool.block_size
        # Prompt logprobs need every prompt row computed.
        found = pool.match(seq) if seq.params.prompt_logprobs is None else []
        need = -(-len(seq.tokens) // size) - len(found) + pool.num_idle(found)
        if need + len(self.running) > pool.num_free:
            self._unfit = seq
            return False
        pool.adopt(seq, found)
        fits = pool.reserve(seq, len(seq.tokens))
        assert fits
        seq.num_computed = len(found) * size
        ready = 0
        while ready < len(found) and pool.draft_ready(found[ready]):
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
        """Take the result of one chunk, before anything else happens to its sequence.

        `tokens` are appended: accepted guesses and one more, already cut at a stop token and at
        `room`; none for a chunk that does not sample. `num_accepted` guesses have their KV in order
        behind the chunk. The drafter's plane is valid as far as the proposer itself said in
        `num_draft_computed`, but not beyond what was accepted. `num_predicted`: of the proposed.
        """
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
        # Most steps fill no block: calls would take longer than to see that.
        if computed >= (seq.num_published + 1) * size:
            pool.publish(seq, computed)
        if seq.num_draft_computed >= (seq.num_draft_ready + 1) * size:
            pool.mark_draft_ready(seq, seq.num_draft_computed)
        if len(seq.blocks) * size >= total + size:
            pool.trim(seq, total)


def _priority(seq: Sequence) -> int:
    return seq.params.priority


def _number(seq: Sequence) -> int:
    return seq.number
