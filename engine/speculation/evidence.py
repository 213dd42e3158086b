"""Evidence: how often a look-up is right, by the number of tokens that matched before the looked-up
token (the "run", in seven grades).

Every committed token shows whether a look-up was right, even one that was not used, so no
exploration is needed. The counts of all sequences are the prior for those of one sequence. Plain
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

START, ASSUMED = -1, 0  # runs without a match: at a text's start; after an assumed replacement

# By grade: how many trials of one text the counts of all weigh. Misses after long runs are rare.
_SHARED_TRIALS = (4.0, 4.0, 4.0, 4.0, 16.0, 16.0, 16.0)
_MEMORY = 256.0  # maximum trials of a grade; above it, its counts are halved
_FIRST_ODDS = 3.0  # prior odds that a prediction is related to the reply
_ODDS = (1 / 16, 4.0)  # bounds of these odds, since the reply may leave the prediction and return


class HitCounts:
    """Counts by grade: looked-up tokens, and how many of them were right."""

    def __init__(self, rates: Seq[float], trials: float = 4.0) -> None:
        self.right = [rate * trials for rate in rates]
        self.trials = [trials] * len(rates)

    def add(self, grade: int, *, right: bool) -> None:
        self.right[grade] += right
        self.trials[grade] += 1.0
        if self.trials[grade] > _MEMORY:
            self.right[grade] *= 0.5
            self.trials[grade] *= 0.5


class Evidence:
    """The evidence of one sequence; `shared` is shared by all. A run is a number of matching
    tokens, START or ASSUMED."""

    def __init__(self, shared: HitCounts) -> None:
        self._everyone = shared
        self._own = HitCounts([0.0] * len(shared.right), 0.0)

    def learn(self, run: int, *, hit: bool) -> None:
        """Record whether a token that was looked up with this run was right."""
        for record in (self._own, self._everyone):
            record.add(_grade(run), right=hit)

    def chances(self, run: int, k: int, *, before: float = 1.0) -> list[float]:
        """Return, for each of k tokens in a row, the chance that it and all before it are right.
        `before`: the chance that the tokens ahead of the first one are right."""
        chances: list[float] = []
        survival, grade, rate = before, -1, 0.0
        for _ in range(k):
            if grade < GRADES - 1:  # the last grade stays
                grade = _grade(run)
                rate = self._rate(grade)
                run = grown(run)
            survival *= rate
            chances.append(survival)
        return chances

    def _rate(self, grade: int) -> float:
        elsewhere = self._everyone.right[grade] / self._everyone.trials[grade]
        right = self._own.right[grade] + _SHARED_TRIALS[grade] * elsewhere
        return right / (self._own.trials[grade] + _SHARED_TRIALS[grade])


class PredictionEvidence(Evidence):
    """Evidence for a prediction that may be unrelated to the reply; then a token with a short run
    is right only by accident, with the chance `by_accident` of its grade (1: as in a related text).
    Each such token updates the odds of the two cases by Bayes' rule, so several wrong ones in a row
    lower the next chances before their own grades were tried."""

    def __init__(self, shared: HitCounts, by_accident: Seq[float]) -> None:
        super().__init__(shared)
        self._by_accident = by_accident
        self._odds = _FIRST_ODDS

    def learn(self, run: int, *, hit: bool) -> None:
        """See Evidence."""
        grade = _grade(run)
        accident = self._by_accident[grade]
        if accident < 1.0 and accident < (right := self._rate(grade)):
            ratio = right / accident if hit else (1 - right) / (1 - accident)
            least, most = _ODDS
            self._odds = min(max(self._odds * ratio, least), most)
        super().learn(run, hit=hit)

    def chances(self, run: int, k: int, *, before: float = 1.0) -> list[float]:
        """See Evidence. The two cases differ only until the first long run."""
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
    """Return the run after one more matching token."""
    return max(run, 1) + 1


def _grade(run: int) -> int:
    """Return the grade, 0 to 6: for runs of -1, 0, 1, 2-3, 4-7, 8-15 and more."""
    return run + 1 if run < 1 else min(run.bit_length() + 1, GRADES - 1)
