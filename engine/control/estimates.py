"""How guesses fare by depth: what the controller learns of a proposer.

Old evidence fades, so the estimate follows a changing world. Pure arithmetic over numbers that are
passed in; what a step costs is `step_costs`'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

# Half-lives: what is older than both, so many outcomes and so many rounds, counts less than half.
_HALF_LIFE, _ROUNDS = 96.0, 32.0
_PRIOR_REJECTION = 0.3
_PRIOR_TRIALS = 4.0
_POOL_WEIGHT = 8.0  # trials that the pooled hazard is worth at each depth
_WINDOW = 12.0  # outcomes after which a surprise counts half
_CHANGE = 3.5  # standard deviations of a surprise that is no chance any more
_APART = 8.0  # sequences of a batch that count as independent, at most: texts begin together
_DOUBT = 4.0  # trials that the past weighs after a change


class Outcome(NamedTuple):
    """Of one sequence in one step: guesses that its main proposer offered; `tried`: of these, those
    whose fate became known, up to the first wrong one (it may have been left out of the forward:
    the token that came instead tells); `right`: of the tried, those that were right."""

    offered: int
    tried: int
    right: int


class AcceptanceEstimate:
    """How a proposal fares by depth: was a guess offered there, and was it right?

    A mismatch is the event of a survival analysis and the end of what was tried is censoring, so a
    short proposal is no evidence against the depths it never reached. Proposers that often have
    nothing to say (n-grams) are described by the offering rates. When the wrong guesses of the last
    few rounds are far from what was expected, the past loses its weight.
    """

    def __init__(self, k_max: int) -> None:
        # Lists: for so few numbers they are quicker than arrays.
        self._trials = [0.0] * k_max  # guesses tried at this depth
        self._rejections = [0.0] * k_max
        self._reached = [1.0] * k_max  # all guesses before this depth were right, k allowing
        self._there = [1.0] * k_max  # of these, a guess was offered
        self._asked = [1.0] * k_max  # k allowed a guess at this depth
        self._offered = [1.0] * k_max
        self.rejection = _PRIOR_REJECTION  # pooled over depths
        self._weight = _PRIOR_TRIALS
        self._surprise = _Surprise()
        self.changes_matter = True
        self.changes = 0  # how often the world was found to be another

    def update(self, k: int, outcomes: Sequence[Outcome], rounds: int = 1) -> None:
        """Learn from the outcomes of so many rounds at `k`."""
        k = min(k, len(self._trials))
        if not k or not outcomes:
            return
        offered, reached, there, tried, wrong = _counts(k, outcomes)
        keep = 0.5 ** min(len(outcomes) / _HALF_LIFE, rounds / _ROUNDS)
        expected = spread = 0.0
        for j in range(k):
            if tried[j]:
                hazard = self.hazard(j)
                expected += tried[j] * hazard
                spread += tried[j] * hazard * (1.0 - hazard)
            self._trials[j] = self._trials[j] * keep + tried[j]
            self._rejections[j] = self._rejections[j] * keep + wrong[j]
            self._asked[j] = self._asked[j] * keep + len(outcomes)
            self._offered[j] = self._offered[j] * keep + offered[j]
            if reached[j]:  # else both would fade to nothing, and their ratio with them
                self._reached[j] = self._reached[j] * keep + reached[j]
                self._there[j] = self._there[j] * keep + there[j]
        found = sum(wrong)
        self._pool(sum(tried), found)
        alike = max(1.0, len(outcomes) / rounds / _APART)
        seen = self._surprise.seen(found, expected, alike * spread, len(outcomes))
        if seen and self.changes_matter:
            self.doubt(_DOUBT)
            self.rejection = min(max(self.rejection * self._surprise.ratio, 0.01), 0.95)
            self._surprise.restart()
            self.changes += 1

    def agree(self, stretches: Sequence[Sequence[bool]], before: int | None = None) -> None:
        """Learn from guesses that were found out in hindsight, for positions in a row: what rounds
        of the longest proposals would have shown there. A single position stands behind a proposal
        that was all right: it says how the next guess would have fared, where it is known how many
        those were (`before`)."""
        k = len(self._trials)
        outcomes = [
            seen for stretch in stretches if len(stretch) > 1 for seen in _rounds(stretch, k)
        ]
        self.update(k, outcomes, len(outcomes))
        alone = [stretch[0] for stretch in stretches if len(stretch) == 1]
        wrong = len(alone) - sum(alone)
        self._pool(len(alone), wrong)
        if alone and before is not None and before < k:
            keep = 0.5 ** min(len(alone) / _HALF_LIFE, 1 / _ROUNDS)
            self._trials[before] = self._trials[before] * keep + len(alone)
            self._rejections[before] = self._rejections[before] * keep + wrong

    def _pool(self, trials: float, wrong: float) -> None:
        if trials:
            weight = self._weight * 0.5 ** (trials / (2 * _HALF_LIFE))
            self._weight = weight + trials
            self.rejection = (self.rejection * weight + wrong) / self._weight

    def doubt(self, trials: float) -> None:
        """Let the past weigh at most this many trials per depth, so that news can overturn it."""
        for count, total in (
            (self._rejections, self._trials),
            (self._there, self._reached),
            (self._offered, self._asked),
        ):
            for j, present in enumerate(total):
                if present > trials:
                    count[j] *= trials / present
                    total[j] = trials
        self._weight = min(self._weight, trials)

    def hazard(self, j: int) -> float:
        """The chance that a guess at depth j + 1 is wrong, all before it being right."""
        pooled = _POOL_WEIGHT * self.rejection
        hazard = (self._rejections[j] + pooled) / (self._trials[j] + _POOL_WEIGHT)
        return min(max(hazard, 0.005), 0.98)

    def chances(self) -> list[float]:
        """For each depth: the chance that a guess there is right, all before it being right."""
        return [1.0 - self.hazard(j) for j in range(len(self._trials))]

    def offering(self) -> list[float]:
        """For each depth: the chance that a guess is offered there."""
        return [some / all_ for some, all_ in zip(self._offered, self._asked, strict=True)]

    def survival(self) -> list[float]:
        """For each depth: the chance that a guess is offered there and it and all before it are
        right."""
        steps = zip(self.chances(), self._there, self._reached, strict=True)
        return list(accumulate((c * there / reached for c, there, reached in steps), mul))


class _Surprise:
    """Wrong guesses of the last rounds against the expected number of them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._found, self._expected, self._spread = 0.0, 0.0, 0.0

    @property
    def ratio(self) -> float:
        return self._found / max(self._expected, 1e-9)

    def seen(self, found: float, expected: float, spread: float, outcomes: int) -> bool:
        """Take in wrong guesses `found` and `expected` among so many outcomes, and the variance
        (`spread`) of the latter. Whether they differ by more than chance."""
        keep = 0.5 ** (outcomes / _WINDOW)
        self._found = self._found * keep + found
        self._expected = self._expected * keep + expected
        self._spread = self._spread * keep * keep + spread
        chance: float = (self._spread + 0.5) ** 0.5
        return abs(self._found - self._expected) > _CHANGE * chance


def _rounds(stretch: Sequence[bool], k: int) -> list[Outcome]:
    """What proposals of `k` guesses each, one behind the other, would have come to."""
    found, right = list[Outcome](), 0
    for hit in stretch:
        if not hit:
            found.append(Outcome(k, min(right + 1, k), right))
            right = 0
        elif right == k:  # the token behind a proposal that was all right
            found.append(Outcome(k, k, k))
            right = 0
        else:
            right += 1
    return [*found, Outcome(k, right, right)] if right else found


def _counts(k: int, outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Per depth, sequences: offered a guess; all before right; both; guess tried; wrong."""
    offered, reached, there, tried, wrong = ([0] * (k + 1) for _ in range(5))
    for (given, known, right), times in Counter(outcomes).items():
        offered[min(given, k)] += times
        reached[min(right + 1, k)] += times
        there[min(right + 1, given, k)] += times
        tried[min(known, k)] += times
        if right < min(known, k):
            wrong[right] += times
    return [*(_beyond(counts) for counts in (offered, reached, there, tried)), wrong[:k]]


def _beyond(counts: list[int]) -> list[int]:
    """From how many ended at each number to how many went beyond it."""
    left, answer = 0, [0] * (len(counts) - 1)
    for i in range(len(counts) - 1, 0, -1):
        left += counts[i]
        answer[i - 1] = left
    return answer
