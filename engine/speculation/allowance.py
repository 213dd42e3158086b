"""Allowance: how many guesses each proposer may make for each sequence of a step.

It stands between the controller, which chooses one K for the main proposer and prices what free
proposers offer, and the requests, which may bound or choose their proposers. Numbers only; who is
asked, and in which order, is the cascade's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, repeat
from operator import itemgetter

from engine.config import MAX_K
from engine.control.controller import KController, Load
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, FreeProposer, Proposal

_FIRST_PAUSE, _LEAST_PAUSE = 1, 8  # tokens that go by after one look-up in vain; that always may
_NEAR = 2 * MAX_K  # rows to catch up that are no more than what guesses at times leave


class Allowance:
    """`begin` a step, then `want` once per sequence that samples; the rest as often as needed."""

    def __init__(
        self, controller: KController, main: str, free: Iterable[FreeProposer], *, branches: int = 0
    ) -> None:
        """`branches`: the most second-best guesses beside a chain."""
        self._controller, self._branches = controller, branches
        self._main = main
        self._free = {proposer.name: proposer for proposer in free}
        self._limits: dict[Sequence, dict[str, int]] = {}
        self.cut: dict[Sequence, Proposal] = {}  # of this step, proposals before `keep` cut them
        self._k, self._leaves, self._num_sequences = 0, 0, 1
        self._probed: set[Sequence] | None = None  # sequences that a probe asks
        self._catch_up_rows: int | None = None  # of a step, while all have much to catch up with
        self.held: set[Sequence] = set()  # whose turn to catch up has not come

    def begin(self, load: Load, running: Seq[Sequence] = ()) -> None:
        """Choose for the step ahead. A probe asks those whom the drafter knows best already."""
        self._num_sequences = load.num_sequences
        self._k = self._controller.choose(load)
        self._leaves = self._branches if self._k and self._controller.branches else 0
        self._probed = None
        if (most := self._controller.max_speculating) is not None:
            asked = [seq for seq in running if self._may_ask(seq)]
            asked.sort(key=lambda seq: seq.num_tokens - seq.num_draft_computed)
            self._probed = set(asked[:most])
        if self._catch_up_rows is not None:
            self._hold(running, self._catch_up_rows)
        self._limits.clear()
        self.cut.clear()

    def take_turns(self, rows: int) -> None:
        """The main proposer is new to all that runs: until it knows all, it catches up with so many
        rows in a step, or with one sequence."""
        self._catch_up_rows = rows

    def _hold(self, running: Seq[Sequence], most: int) -> None:
        behind = [(seq.num_tokens - seq.num_draft_computed, seq) for seq in running]
        behind = sorted((pair for pair in behind if pair[0] > _NEAR), key=itemgetter(0))
        rows = list(accumulate(backlog for backlog, _ in behind))
        turn = max(sum(total <= most for total in rows), 1)
        self.held = {seq for _, seq in behind[turn:]}
        if not self.held:
            self._catch_up_rows = None

    def want(self, seq: Sequence) -> int:
        """How many guesses about `seq` may be verified: so many rows are to be kept for them."""
        if seq.constraint is not None and seq.constraint.is_slow:
            seq.sources = ()
        if seq.sources is None and self._probed is None and not self.held:
            return self._k + self._leaves
        main = self._of_main(seq) if self._k else 0
        rows = main + self._leaves if main else 0
        if seq.sources is None or len(seq.tokens) < seq.asks_from:
            return rows
        free = self._worth(seq)
        if not free and self.is_open(seq):
            self._pause(seq)
            return rows
        seq.pause //= 4
        limits = self._limits[seq] = {**free, self._main: main}
        return max(limits.values())

    def limits(self, seq: Sequence) -> Mapping[str, int] | None:
        """After `want`, how many guesses each proposer may make, by name; None if the sequence is
        left to the main one, unbounded by its request."""
        found = self._limits.get(seq)
        return {self._main: self._k} if found is None and self._leaves else found

    def asked(self, chunk: Chunk) -> int:
        """Guesses that the main proposer may make for it, where nobody before it had any."""
        limits = self.limits(chunk.seq) if self._limits or self._leaves else None
        return chunk.k if limits is None else min(limits[self._main], chunk.k)

    def keep(self, chunks: Seq[Chunk], proposals: list[Proposal]) -> list[Proposal]:
        """The proposals, the main proposer's without the guesses that are not worth their rows, and
        with second-best ones that are.
        Lawful since a proposal never influences a token (speculation.verify)."""
        sure = [i for i, proposal in enumerate(proposals) if proposal.confidences]
        if not sure:
            return proposals
        kept = list(proposals)
        confidences = [proposals[i].confidences for i in sure]
        lengths = self._controller.keep(confidences)
        leaves: Iterable[Seq[int]] = repeat(())
        if self._leaves:
            leaves = self._controller.branch(confidences, lengths)
        for i, length, places in zip(sure, lengths, leaves, strict=False):
            made, room = proposals[i], min(chunks[i].k - length, self._leaves)
            own = [at for at in places if made.second_best and made.second_best[at] >= 0][:room]
            if own or length < len(made):
                self.cut[chunks[i].seq] = made
                kept[i] = made.branched(own, length) if length else EMPTY
        return kept

    def is_open(self, seq: Sequence) -> bool:
        """Whether the main proposer may make as many guesses as it is asked for."""
        if seq in self.held:
            return False
        return seq.sources is None or (self._main in seq.sources and seq.max_draft is None)

    def _may_ask(self, seq: Sequence) -> bool:
        """Whether the main proposer may guess for it."""
        return seq.sources is None or (self._main in seq.sources and seq.max_draft != 0)

    def _of_main(self, seq: Sequence) -> int:
        """Guesses of the main proposer, if it is asked."""
        if (self._probed is not None and seq not in self._probed) or not self._may_ask(seq):
            return 0
        if seq in self.held:
            return 0
        return self._k if seq.max_draft is None else min(self._k, seq.max_draft)

    def _pause(self, seq: Sequence) -> None:
        """The look-ups had nothing that pays: let some tokens go by before the next one, twice as
        many as the last time, since a look-up takes time. At most four times the number of
        sequences and of guesses (of tokens that cost less, a look-up costs more) and
        `FreeProposer.pause`."""
        names = [name for name in seq.sources or () if name != self._main]
        seq.pause = min(
            max(2 * seq.pause, _FIRST_PAUSE),
            max(4 * (self._num_sequences + self._k), _LEAST_PAUSE),
            min([self._free[name].pause for name in names], default=0),
        )
        seq.asks_from = seq.num_tokens + seq.pause

    def _worth(self, seq: Sequence) -> dict[str, int]:
        """By name, how many guesses of each free proposer are worth their rows, where any are."""
        most, bound = self._controller.k_max, seq.max_draft
        most = most if bound is None else min(most, bound)
        found: dict[str, int] = {}
        if not most:
            return found
        for name in seq.sources or ():
            chances = self._free[name].forecast(seq, most) if name != self._main else []
            if chances and (length := self._controller.worth(chances, instead=self._may_ask(seq))):
                found[name] = length
        return found
