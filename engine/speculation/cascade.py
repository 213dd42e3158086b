"""Several proposers in a row: each sequence has its list, and the first that has something to say
serves it.

There is one main proposer, and there are free ones, which look things up; a sequence about which
they have nothing to say that pays is left to the main one as if they were not there. A list is
walked in its order; the main proposer is asked once per step, for all sequences that got as far as
to it, so that a draft forward is never spent on a sequence that another served. One proposal has
one source: a draft that went on behind a looked-up beginning would first have to run that
beginning, which costs what guessing it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.grammar import trimmed
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified

Limits = Callable[[Sequence], Mapping[str, int] | None]


class Cascade(Proposer):
    """`limits` says how many guesses each proposer may make for a sequence, by the
    names in `Sequence.sources`, which must all be known here; None: it is left to the main one."""

    def __init__(self, main: Proposer, free: Seq[Proposer], *, limits: Limits) -> None:
        self.name = main.name
        self.follows_grammar = main.follows_grammar
        self._main = main
        self._free = {proposer.name: proposer for proposer in free if proposer.name != main.name}
        self._limits = limits
        self._learners = [own for own in (main, *self._free.values()) if own.learns]
        self.learns = bool(self._learners)
        self.every_node = any(own.every_node for own in self._learners)
        self.hidden = main.hidden

    @property
    def names(self) -> tuple[str, ...]:
        """Everyone who may be asked, the main proposer last."""
        return (*self._free, self._main.name)

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """As proposal.Proposer."""
        self.forward_seconds, self.catch_up_rows, self.agreements = 0.0, 0, ()
        proposals, left = self.look_up(chunks)
        if not any(chunk.k for chunk in left):
            return proposals
        drafted = self._main.propose(left)
        self.take_over()
        return [own if len(own) else main for own, main in zip(proposals, drafted, strict=True)]

    def take_over(self) -> None:
        """Copy timings and agreements of main-proposer calls that bypassed this cascade."""
        main = self._main
        self.forward_seconds, self.catch_up_rows = main.forward_seconds, main.catch_up_rows
        self.agreements = main.agreements

    def learn(self, verified: Seq[Verified]) -> None:
        for proposer in self._learners:
            proposer.learn(verified)

    def forget(self, seq: Sequence) -> None:
        self._main.forget(seq)
        if seq.sources is not None:
            for proposer in self._free.values():
                proposer.forget(seq)

    def look_up(self, chunks: Seq[Chunk]) -> tuple[list[Proposal], list[Chunk]]:
        """What the free ones guess, and what is left to the main one: k is 0 where they did."""
        proposals: list[Proposal] = []
        left: list[Chunk] = []
        for chunk in chunks:
            limits = self._limits(chunk.seq) if chunk.k else None
            if limits is None:
                proposals.append(EMPTY)
                left.append(chunk)
            else:
                proposal, k = self._walk(chunk, limits)
                proposals.append(proposal)
                left.append(_asking(chunk, k))
        return proposals, left

    def _walk(self, chunk: Chunk, limits: Mapping[str, int]) -> tuple[Proposal, int]:
        """What a free proposer says, or how many guesses are left to the main one."""
        for name in chunk.seq.sources or (self._main.name,):
            k = min(chunk.k, limits.get(name, 0))
            if k and name == self._main.name:
                return EMPTY, k
            if k:
                [proposal] = self._free[name].propose([_asking(chunk, k)])
                if chunk.seq.constraint is not None:  # what it forbids is no reason not to ask on
                    proposal = trimmed(proposal, chunk.seq.constraint)
                if len(proposal):
                    return proposal, 0
        return EMPTY, 0


def _asking(chunk: Chunk, k: int) -> Chunk:
    """For so many guesses."""
    return chunk if k == chunk.k else Chunk(chunk.seq, chunk.start, chunk.length, k)
