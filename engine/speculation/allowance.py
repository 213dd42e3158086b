"""Allowance: how many tokens each proposer may propose for each sequence of a step.

It combines the controller, which chooses one K for the main proposer and prices free proposals,
with the bounds and lists of proposers in the requests. Numbers only; the cascade decides which
proposers are asked, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, repeat
from math import inf
from operator import itemgetter

from engine.config import MAX_K
from engine.control.controller import Choice, KController, Load
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, GRAMMAR, FreeProposer, Proposal

_NEAR = 32  # catch-up rows that normal operation sometimes leaves, at least
_OUTDONE = 64  # most tokens to skip after a useless look-up if the main proposer gains more


class Allowance:
    """Call `begin` once per step, `draft_rows` once per sampling sequence, the rest at any time.
    `choice`: the controller's for this step. `leaves`: the most second-best tokens beside a chain,
    which the host places when it has seen the chain; a tree has at most MAX_K nodes."""

    def __init__(
        self, controller: KController, main: str, free: Iterable[FreeProposer], *, branches: int = 0
    ) -> None:
        """`branches`: maximum second-best tokens beside a chain."""
        self._controller, self._branches = controller, branches
        self._main = main
        self._free = {proposer.name: proposer for proposer in free}
        self._limits: dict[Sequence, dict[str, int]] = {}
        # Look-ups that gain less than the main proposer: limits without it, and the gains.
        self._replaced: dict[Sequence, tuple[dict[str, int], float]] = {}
        self.cut: dict[Sequence, Proposal] = {}  # this step's proposals as they were before `keep`
        self.choice, self._k, self.leaves, self._num_sequences = Choice(), 0, 0, 1
        self._probe_set: set[Sequence] | None = None  # sequences of a probe
        self._catch_up_rows: int | None = None  # rows per step while `limit_catch_up` is in effect
        self.waiting = set[Sequence]()  # for their turn to catch up, or since a grammar is slow

    def begin(self, load: Load, running: Seq[Sequence] = ()) -> None:
        """Have the controller choose K. A probe asks the sequences with the least catch-up."""
        self._num_sequences = load.num_sequences
        self.choice = choice = self._controller.choose(load)
        self._k, self._probe_set, self.waiting = choice.k, None, set()
        self.leaves = min(self._branches, MAX_K - self._k) if self._k and choice.branches else 0
        if (most := choice.max_speculating) is not None:
            candidates = [seq for seq in running if self._may_ask(seq)]
            candidates.sort(key=lambda seq: seq.num_tokens - seq.num_draft_computed)
            self._probe_set = set(candidates[:most])
        if self._catch_up_rows is not None:
            self._choose_waiting(filter(self._may_ask, running), self._catch_up_rows)
        self._limits.clear()
        self._replaced.clear()
        self.cut.clear()

    def limit_catch_up(self, rows: int) -> None:
        """Limit catch-up after the main proposer was replaced by one that knows no running
        sequence: until all have caught up, `rows` rows per step, but at least one sequence."""
        self._catch_up_rows = rows

    def _choose_waiting(self, asked: Iterable[Sequence], most: int) -> None:
        behind = [(seq.num_tokens - seq.num_draft_computed, seq) for seq in asked]
        near = max(2 * self._controller.k_max, _NEAR)
        behind = sorted((pair for pair in behind if pair[0] > near), key=itemgetter(0))
        rows = list(accumulate(backlog for backlog, _ in behind))
        turn = max(sum(total <= most for total in rows), 1)
        self.waiting = {seq for _, seq in behind[turn:]}
        if not self.waiting:
            self._catch_up_rows = None

    def draft_rows(self, seq: Sequence) -> int:
        """Return how many draft tokens may be verified; KV and rows are reserved for them."""
        if seq.constraint is not None and seq.constraint.is_slow:
            self.waiting.add(seq)
            return 0
        if seq.sources is None and self._probe_set is None and not self.waiting:
            return self._k + self.leaves
        main = self._of_main(seq) if self._k else 0
        rows = main + self.leaves if main else 0
        paused = len(seq.tokens) < seq.lookup_from or self.choice.reason == "baseline"
        if seq.sources is None or paused:
            return rows
        # Look-ups behind the main proposer serve only where it is not asked.
        names = seq.sources[: seq.sources.index(self._main)] if main else seq.sources
        free = self._free_counts(seq, names)
        if not free and self.is_open(seq):
            if names:
                self._pause(seq)
            return rows
        seq.paid_at = seq.num_tokens
        limits = self._limits[seq] = {**free, self._main: main}
        return max(limits.values())

    def leave_out_main(self, chunks: Seq[Chunk]) -> None:
        """Call between `draft_rows` and `limits`. Leaves the main proposer out, for the look-ups
        that it would have replaced, if it gains less than it costs."""
        (cost, gain), limits = self.choice.drafting, self._limits
        if not limits:
            return
        asked = [seq for seq, _, _, k in chunks if k and len(limits.get(seq, ())) < 2]
        replaced = [self._replaced[seq][1] for seq in asked if seq in self._replaced]
        if gain * len(asked) - sum(replaced) < cost:
            self._k = 0
            for own in limits.values():
                own[self._main] = 0
            limits.update({seq: own for seq, (own, _) in self._replaced.items() if seq in asked})

    def limits(self, seq: Sequence) -> Mapping[str, int] | None:
        """Return how many tokens each proposer may propose, by name. None if only the main one is
        asked, without a bound of the request. Call after `draft_rows`."""
        own = self._limits.get(seq)
        return {self._main: self._k} if own is None and (self.leaves or not self._k) else own

    def main_limit(self, chunk: Chunk) -> int:
        """Return how many tokens the main proposer may propose if no proposer before it has any."""
        limits = self.limits(chunk.seq) if self._limits or self.leaves else None
        return chunk.k if limits is None else min(limits[self._main], chunk.k)

    def keep(self, chunks: Seq[Chunk], proposals: list[Proposal]) -> list[Proposal]:
        """Return the proposals. Those of the main proposer lose tokens that are not worth their
        rows, and gain second-best tokens that are. Texts stay the same, since a proposal never
        influences a token (speculation.verify)."""
        sure = [i for i, proposal in enumerate(proposals) if proposal.confidences]
        if not sure:
            return proposals
        kept = list(proposals)
        confidences = [proposals[i].confidences for i in sure]
        lengths = self._controller.kept_counts(confidences)
        leaves: Iterable[Seq[int]] = repeat(())
        if self.leaves:
            leaves = self._controller.branch(confidences, lengths)
        for i, length, places in zip(sure, lengths, leaves, strict=False):
            if length == len(proposals[i].tokens) and not places:
                continue
            whole, room = proposals[i], min(chunks[i].k - length, self.leaves)
            own = whole.branched(places, length, room) if length else EMPTY
            if own is not whole:
                self.cut[chunks[i].seq], kept[i] = whole, own
        return kept

    def is_open(self, seq: Sequence) -> bool:
        """Whether the main proposer may propose as many tokens as the controller chooses."""
        unbounded = seq.sources is None or (self._main in seq.sources and seq.max_draft is None)
        return unbounded and seq not in self.waiting

    def _may_ask(self, seq: Sequence) -> bool:
        """Whether the main proposer may propose for the sequence."""
        if seq in self.waiting or (seq.constraint is not None and seq.constraint.is_slow):
            return False
        return seq.sources is None or (self._main in seq.sources and seq.max_draft != 0)

    def _of_main(self, seq: Sequence) -> int:
        """Return how many tokens the main proposer may propose if it is asked."""
        probed = self._probe_set is None or seq in self._probe_set
        if not probed or not self._may_ask(seq):
            return 0
        return self._k if seq.max_draft is None else min(self._k, seq.max_draft)

    def _pause(self, seq: Sequence) -> None:
        """Skip some tokens before the next look-up, since none pays and look-ups take time: a third
        of the tokens since one paid. At most twice the other sequences, since a look-up takes
        little of a step of few, and the proposers' bounds; at most `_OUTDONE` if the main proposer
        gains more and no tokens may be forced."""
        names = [name for name in seq.sources or () if name != self._main]
        most = [2 * (self._num_sequences - 1), *(self._free[name].pause for name in names)]
        if seq in self._replaced and GRAMMAR not in names:
            most = [_OUTDONE, 4 * (self._num_sequences + self._k)]
        since = seq.num_tokens - max(seq.paid_at, seq.num_prompt)
        seq.lookup_from = seq.num_tokens + min(since // 3, *most)

    def _free_counts(self, seq: Sequence, names: Seq[str]) -> dict[str, int]:
        """Return how many tokens of each look-up are worth their rows, if any; the one that gains
        the most first."""
        most, bound = self._controller.k_max, seq.max_draft
        most = most if bound is None else min(most, bound)
        gain = self.choice.drafting[1] if self._may_ask(seq) else -inf
        found = list[tuple[float, str, int]]()
        for name in names if most else ():
            if name != self._main and (chances := self._free[name].forecast(seq, most)):
                n, own = self.choice.free_count(chances)
                if n:
                    found.append((own, name, n))
        found.sort(key=itemgetter(0), reverse=True)  # stable: the order of the request for equals
        if found and found[0][0] < gain:
            own, name, n = found[0]
            self._replaced[seq] = {name: n, self._main: 0}, own
        return {name: n for own, name, n in found if own >= gain}
