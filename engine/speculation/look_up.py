"""A look-up: a free proposer that follows each sequence through a text, and guesses what comes next
there. What the text is, and where in it a sequence is, is the followers' affair. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from engine.control.step_record import Agreement
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal, chain


class Follower(Protocol):
    """One sequence's place in a text. Asked only after it was told, by `extend`, to look at what
    was committed since the last time."""

    def extend(self, seq: Sequence) -> None: ...

    def next(self, seq: Sequence, k: int) -> list[int]:
        """The guesses, at most `k`; none while the place is lost."""
        ...

    def chances(self, k: int, least: float) -> list[float]:
        """For each of the guesses that `next` would make, the chance that it and all before it are
        right; none if the first is not as likely as `least`."""
        ...


class LookUp:
    """A FreeProposer. `begin` makes the follower of a sequence when it is first asked about."""

    follows_grammar = False
    forward_seconds = 0.0
    catch_up_rows = 0
    agreements: Seq[Agreement] = ()

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

    def forecast(self, seq: Sequence, k: int, least: float = 0.0) -> list[float]:
        return self._follow(seq).chances(k, least)

    def _follow(self, seq: Sequence) -> Follower:
        follower = self._followers.get(seq)
        if follower is None:
            follower = self._followers[seq] = self._begin(seq)
        follower.extend(seq)
        return follower
