"""A look-up: a free proposer that follows each sequence through a text, and guesses what comes next
there. What the text is, and where in it a sequence is, is the followers' affair. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.evidence import Evidence
from engine.speculation.proposal import EMPTY, FreeProposer, Proposal, chain


class Follower(ABC):
    """One sequence's place in a text: `at` is the index expected next, None while lost; `run` the
    evidence for it. Asked only after `extend`."""

    def __init__(self, evidence: Evidence, at: int | None, run: int) -> None:
        self._evidence = evidence
        self._at, self._run = at, run
        self._seen = 0  # tokens that were looked at

    @abstractmethod
    def extend(self, seq: Sequence) -> None:
        """Look at what was committed since the last time."""

    @abstractmethod
    def next(self, seq: Sequence, k: int) -> list[int]:
        """The guesses, at most `k`; none while the place is lost."""

    @abstractmethod
    def most(self, k: int) -> int:
        """How many guesses `next` would make of `k`, unless the place is lost."""

    def chances(self, k: int) -> list[float]:
        """For each of the guesses that `next` would make, the chance that it and all before it are
        right."""
        return [] if self._at is None else self._evidence.chances(self._run, self.most(k))


class LookUp(FreeProposer):
    """`begin` makes the follower of a sequence when it is first asked about."""

    def __init__(self, name: str, begin: Callable[[Sequence], Follower], *, pause: int) -> None:
        self.name, self.pause = name, pause
        self._begin = begin
        self._followers: dict[Sequence, Follower] = {}

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        found = []
        for chunk in chunks:
            guesses: list[int] = []
            if chunk.k > 0 and chunk.samples:
                guesses = self._follow(chunk.seq).next(chunk.seq, chunk.k)
            found.append(chain(guesses, self.name) if guesses else EMPTY)
        return found

    def forget(self, seq: Sequence) -> None:
        self._followers.pop(seq, None)

    def forecast(self, seq: Sequence, k: int) -> list[float]:
        return self._follow(seq).chances(k)

    def _follow(self, seq: Sequence) -> Follower:
        follower = self._followers.get(seq)
        if follower is None:
            follower = self._followers[seq] = self._begin(seq)
        follower.extend(seq)
        return follower
