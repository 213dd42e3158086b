"""LongBaseline: how much cheaper K = 0 becomes when it is played for a hundred rounds.

What a batch reads at K = 0 may just fit caches that it does not fit with guesses. This is no matter
of how many rows a step has, so it is no part of the cost model: it is measured now and then. Where
K = 0 is then played and is no faster than guesses were, the measurement is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log
from statistics import median

ROUNDS = 64  # of a long baseline; as many more while they get cheaper
_SHOWN, _ENOUGH = 8, 4  # of these the first but one, and the last, that are compared; at least
_STRETCHES = 4  # at most
_FIRST, _AGAIN, _MOST = 48, 96, 8192  # rounds with guesses before the first, a second, and others
_FORGETS = 4096  # rounds at K = 0 after which half of what was found counts
_SETTLED = 96  # rounds at K = 0 after which it is judged
_GAIN, _LITTLE = 0.5, 0.25  # of guesses: where they gain more it could hardly be made up for
_DEARER = 1.1  # more says that the machine became slower meanwhile, and nothing else
_SLOW = 1.3  # times their seconds at start: where steps take less there is nothing to find
_FALLS, _MATTERS = 0.95, 0.75  # less is cheaper than before; and more may be noise in the end


@dataclass(slots=True)
class _Size:
    logs: float = 0.0  # sum over baselines of the logarithm of LongBaseline.part
    count: int = 0  # of them
    wait: int = _FIRST  # rounds with guesses until the next
    gone: int = 0  # of these; at K = 0 since something was found
    left_at: float = 0.0  # tokens per second with guesses, until K = 0 is judged by it

    @property
    def part(self) -> float:
        found = exp(self.logs / (self.count + 1))
        return found if found < _MATTERS else 1.0


class LongBaseline:
    """`go` once a round. Where a long baseline `is_due`, `begin` one, and `add` the seconds of its
    rounds that are `wanted`. A size is the bit length of the number of sequences."""

    def __init__(self) -> None:
        self._sizes = {0: _Size()}
        self._now = self._sizes[0]
        self._early: list[float] = []
        self._late: list[float] = []
        self._least = inf  # seconds at the end of a stretch
        self._sequences = 0  # of the first that was added
        self._context = 0  # of those that were added, the most

    def restart(self, size: int) -> None:
        """Another batch size; what was being measured is over."""
        self._now = self._sizes.setdefault(size, _Size())

    def go(self, rounds: int, *, on: bool) -> None:
        """So many rounds, with guesses or without."""
        now = self._now
        if on or now.part < 1.0:
            now.gone += rounds
        if not on and now.gone >= _FORGETS:
            now.logs, now.gone = 0.5 * now.logs, 0

    @property
    def part(self) -> float:
        """Of the seconds that a round at K = 0 takes among others, those that it takes when it
        stays: 1 where these are about as many."""
        return self._now.part

    def turn(self, rate: float) -> None:
        """K = 0 is chosen, where guesses made so many tokens per second."""
        self._now.left_at = rate if self.part < 1.0 else 0.0

    def judge(self, rate: float, rounds: int) -> None:
        """After so many rounds at K = 0 it makes so many tokens per second. If that is no more than
        guesses made, what was found was noise."""
        now = self._now
        if not now.left_at or rounds < _SETTLED:
            return
        if rate < now.left_at:
            now.logs, now.wait, now.gone = 0.0, _MOST, 0
        now.left_at = 0.0

    def is_due(self, gain: float, slow: float, grown: float = 1.0, *, crowd: bool = False) -> bool:
        """Whether to begin a long baseline, while guesses gain so much and steps take so many times
        what they took when they were profiled, a size at a time. A first one of a crowd is due,
        too, where they take so many times as long as those of short contexts, and guesses gain
        little: most of what it reads may be context."""
        now = self._now
        if crowd and now.wait == _FIRST and gain < _LITTLE:
            slow = max(slow, grown)
        return now.gone >= now.wait and gain < _GAIN and slow > _SLOW

    def begin(self) -> None:
        """It may be cut short or tell nothing: then, too, the next one comes later."""
        self._early, self._late, self._least = [], [], inf
        self._sequences = self._context = 0
        self._now.gone, self._now.wait = 0, min(4 * self._now.wait, _MOST)

    @staticmethod
    def wanted(gone: int) -> bool:
        """Whether to be told what a round of it takes, `gone` rounds after its first."""
        return 0 < gone <= _SHOWN or gone % ROUNDS >= ROUNDS - _SHOWN

    def add(self, gone: int, seconds: float, sequences: int = 1, context: int = 0) -> bool:
        """What it took, of so many sequences with so many tokens of context among them (0: that is
        not known); 0 sequences: of something else than decoding without guesses, which tells
        nothing. Whether it goes on for as many rounds again. The last one concludes."""
        if sequences and self._is_alike(sequences, context):
            (self._early if gone <= _SHOWN else self._late).append(seconds)
        if gone <= _SHOWN or gone % ROUNDS < ROUNDS - 1:
            return False
        if min(len(self._early), len(self._late)) < _ENOUGH:
            return False
        early, now = (max(median(some), 1e-9) for some in (self._early, self._late))
        falls = now < _FALLS * min(self._least, early)
        self._least, self._late = min(self._least, now), []
        if falls and gone < _STRETCHES * ROUNDS - 1:
            return True
        self._conclude(self._least / early)
        return False

    def _is_alike(self, sequences: int, context: int) -> bool:
        """Whether it is a round of as many sequences as the first, and their contexts are no
        shorter than they were: they get longer, and where long texts end and others begin, less is
        read."""
        self._sequences = self._sequences or sequences
        self._context = max(self._context, context)
        other = abs(sequences - self._sequences) * _SHOWN > self._sequences
        shorter = 0 < context < self._context * (1 - 1 / _SHOWN)
        return not (other or shorter)

    def _conclude(self, found: float) -> None:
        now = self._now
        if found > _DEARER:
            now.wait = max(now.wait // 2, _AGAIN)  # twice what it was
            return
        now.logs, now.count = now.logs + log(min(found, 1.0)), now.count + 1
        if now.part < 1.0:
            now.wait = _MOST
        elif found < _MATTERS:
            now.wait = _AGAIN
