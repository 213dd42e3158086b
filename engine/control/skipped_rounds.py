"""SkippedRounds: rounds in which the controller neither chooses nor observes. Of some a short
observation is kept, to be learnt from with the next full one.
"""

from __future__ import annotations


class SkippedRounds:
    """`begin` after a round that was looked at, then `go` once a round until it says no, then
    `end`."""

    def __init__(self) -> None:
        self.k = 0  # draft steps in each
        self._rounds = self._gone = 0
        self._every = 1

    def begin(self, k: int, rounds: int, *, every: int = 1) -> None:
        """So many rounds with `k` draft steps, of which one in `every` is overheard."""
        self.k, self._rounds, self._gone, self._every = k, rounds, 0, every

    def go(self) -> bool:
        """Whether this round is one of them."""
        if self._gone >= self._rounds:
            return False
        self._gone += 1
        return True

    @property
    def is_overheard(self) -> bool:
        """Whether this round is."""
        return self._gone % self._every == 0

    def end(self) -> int:
        """No more of them. How many there were since `begin`."""
        gone, self._rounds, self._gone = self._gone, 0, 0
        return gone
