"""How often a look-up is right, by the evidence it has: how many tokens in a row agreed before its
guess (a "run", in one of seven grades).

Every committed token tells whether a look-up had it right, whoever guessed it and whether or not
the look-up was asked, so nothing has to be tried out. Counts of one sequence, with those of all
sequences as a prior. Plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

START, SUPPOSED = -1, 0  # runs without a match: at the begin of a text; on a mere supposition

_PRIOR_TRIALS = 4.0
_MEMORY = 256.0  # trials of a grade; beyond them all of its past is halved


class Record:
    """Guesses by grade of evidence: how many there were, and how many were right."""

    def __init__(self, rates: Seq[float], trials: float = _PRIOR_TRIALS) -> None:
        self.right = [rate * trials for rate in rates]
        self.trials = [trials] * len(rates)

    def add(self, grade: int, *, hit: bool) -> None:
        self.right[grade] += hit
        self.trials[grade] += 1.0
        if self.trials[grade] > _MEMORY:
            self.right[grade] *= 0.5
            self.trials[grade] *= 0.5


class Evidence:
    """Of one sequence; `everyone` is shared by all. A run is a number of tokens that agreed, or
    START or SUPPOSED."""

    def __init__(self, everyone: Record) -> None:
        self._everyone = everyone
        self._own = Record([0.0] * len(everyone.right), 0.0)

    def learn(self, run: int, *, hit: bool) -> None:
        """What became of a guess that stood on this run."""
        grade = _grade(run)
        self._own.add(grade, hit=hit)
        self._everyone.add(grade, hit=hit)

    def chances(self, run: int, k: int) -> list[float]:
        """For each of k guesses in a row, that it and all before it are right."""
        chances, survival = list[float](), 1.0
        for _ in range(k):
            survival *= self._rate(_grade(run))
            chances.append(survival)
            run = grown(run)
        return chances

    def rate(self, run: int) -> float:
        """The chance that the first of these guesses is right."""
        return self._rate(_grade(run))

    def _rate(self, grade: int) -> float:
        elsewhere = self._everyone.right[grade] / self._everyone.trials[grade]
        right = self._own.right[grade] + _PRIOR_TRIALS * elsewhere
        return right / (self._own.trials[grade] + _PRIOR_TRIALS)


GRADES = 7


def grown(run: int) -> int:
    """The evidence after one more token agreed."""
    return max(run, 1) + 1


def _grade(run: int) -> int:
    """0 to 6 for a run of -1, 0, 1, 2-3, 4-7, 8-15, more."""
    return run + 1 if run < 1 else min(run.bit_length() + 1, GRADES - 1)
