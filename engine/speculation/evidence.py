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
_FIRST_ODDS = 3.0  # that a text is what it is given for, before anything came
_ODDS = (1 / 16, 4.0)  # their bounds: what comes may turn away from the text, or back to it


class Record:
    """Guesses by grade of evidence: how many there were, and how many were right."""

    def __init__(self, rates: Seq[float], trials: float = _PRIOR_TRIALS) -> None:
        self.right = [rate * trials for rate in rates]
        self.trials = [trials] * len(rates)

    def add(self, grade: int, *, right: bool) -> None:
        self.right[grade] += right
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
        for record in (self._own, self._everyone):
            record.add(_grade(run), right=hit)

    def chances(self, run: int, k: int, *, before: float = 1.0) -> list[float]:
        """For each of k guesses in a row, that it and all before it are right; `before`: the chance
        that those ahead of the first are."""
        chances: list[float] = []
        survival, grade, rate = before, -1, 0.0
        for _ in range(k):
            if grade < GRADES - 1:  # the last one stays
                grade = _grade(run)
                rate = self._rate(grade)
                run = grown(run)
            survival *= rate
            chances.append(survival)
        return chances

    def _rate(self, grade: int) -> float:
        elsewhere = self._everyone.right[grade] / self._everyone.trials[grade]
        right = self._own.right[grade] + _PRIOR_TRIALS * elsewhere
        return right / (self._own.trials[grade] + _PRIOR_TRIALS)


class Doubted(Evidence):
    """For a prediction that may be unrelated to the reply, so that a guess on a weak run is right
    by accident: at `by_accident`, by grade (1: no less often than in the right text). Each guess on
    a weak run tells for the one or the other by Bayes' rule, so several that were wrong in a row
    make the next ones unlikely before their own grades were tried."""

    def __init__(self, everyone: Record, by_accident: Seq[float]) -> None:
        super().__init__(everyone)
        self._by_accident = by_accident
        self._odds = _FIRST_ODDS

    def learn(self, run: int, *, hit: bool) -> None:
        """As Evidence."""
        grade = _grade(run)
        accident = self._by_accident[grade]
        if accident < 1.0 and accident < (right := self._rate(grade)):
            ratio = right / accident if hit else (1 - right) / (1 - accident)
            least, most = _ODDS
            self._odds = min(max(self._odds * ratio, least), most)
        super().learn(run, hit=hit)

    def chances(self, run: int, k: int, *, before: float = 1.0) -> list[float]:
        """As Evidence; which of the two texts it is matters up to the first strong run."""
        chances = list[float]()
        meant = before * self._odds / (1 + self._odds)
        other = before - meant
        while len(chances) < k and (accident := self._by_accident[_grade(run)]) < 1.0:
            right = self._rate(_grade(run))
            meant, other = meant * right, other * min(accident, right)
            chances.append(meant + other)
            run = grown(run)
        return chances + super().chances(run, k - len(chances), before=meant + other)


GRADES = 7


def grown(run: int) -> int:
    """The evidence after one more token agreed."""
    return max(run, 1) + 1


def _grade(run: int) -> int:
    """0 to 6 for a run of -1, 0, 1, 2-3, 4-7, 8-15, more."""
    return run + 1 if run < 1 else min(run.bit_length() + 1, GRADES - 1)
