"""Cascade: for each sequence, the first proposer that has a proposal.

There is one main proposer and several free ones, which look tokens up. The main proposer is asked
once per step, for all sequences without a free proposal that pays, so no draft forward is spent on
the others. A proposal has one source: to continue a looked-up beginning, a draft would first have
to run it, which costs as much as drafting it.
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
    """`limits(seq)`: how many tokens the main proposer and some look-ups may propose, by name, in
    the order in which look-ups are asked; None: only the main one is asked."""

    def __init__(self, main: Proposer, free: Seq[Proposer], *, limits: Limits) -> None:
        self.name = main.name
        self.follows_grammar = main.follows_grammar
        self._main = main
        self._free = {proposer.name: proposer for proposer in free if proposer.name != main.name}
        self._limits = limits
        self._learners = [each for each in (main, *self._free.values()) if each.learns]
        self.learns = bool(self._learners)
        self.every_node = any(each.every_node for each in self._learners)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all proposers, the main one last."""
        return (*self._free, self._main.name)

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """See proposal.Proposer."""
        self.forward_seconds, self.catch_up_rows, self.agreements = 0.0, 0, ()
        proposals, left = self.look_up(chunks)
        if not any(chunk.k for chunk in left):
            return proposals
        drafted = self._main.propose(left)
        self.take_over()
        both = zip(proposals, drafted, strict=True)
        return [free if len(free) else main for free, main in both]

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
        """Return the proposals of the free proposers, and the chunks for the main one, with k = 0
        where a free one had a proposal."""
        proposals: list[Proposal] = []
        left: list[Chunk] = []
        for chunk in chunks:
            proposal, k = EMPTY, chunk.k
            if k and (limits := self._limits(chunk.seq)) is not None:
                proposal, k = self._walk(chunk, limits)
            proposals.append(proposal)
            left.append(chunk if k == chunk.k else chunk._replace(k=k))
        return proposals, left

    def _walk(self, chunk: Chunk, limits: Mapping[str, int]) -> tuple[Proposal, int]:
        """Return the first free proposal, or how many tokens the main proposer may propose."""
        for name, most in limits.items():
            if name != self._main.name and (k := min(chunk.k, most)):
                [proposal] = self._free[name].propose([chunk._replace(k=k)])
                if chunk.seq.constraint is not None:  # if nothing is left, ask the next one
                    proposal = trimmed(proposal, chunk.seq.constraint)
                if len(proposal):
                    return proposal, 0
        return EMPTY, min(chunk.k, limits[self._main.name])
