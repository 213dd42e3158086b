"""Acceptance: how a proposer's guesses fare by depth, and how far its confidence can be trusted.

A survival model of the first mismatch, with fading counts, gives the acceptance by depth. A
logistic regression of three weights, fitted online, sharpens it by confidence:

    logit P(right) = w0 + w1 logit(prior) + w2 (confidence - mean) / deviation

The confidence stands beside the prior as evidence, so a useless one is soon ignored. A sample of
the last proposals stands for the next ones. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from math import exp

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.step_record import Outcome

Array = NDArray[np.float64]
Guess = tuple[float, float, bool]  # log-odds of the prior, confidence, and whether it was right
Confidences = Sequence[Sequence[float]]  # by sequence, one for each of its guesses in order

_SAMPLE = 64  # proposals that stand for the next ones
_LATEST = 8  # proposals of one step that go into the sample
# Half-lives: what is older than both, so many outcomes and so many rounds, counts less than half.
_HALF_LIFE, _ROUNDS = 96.0, 32.0
_PRIOR_REJECTION = 0.3
_PRIOR_TRIALS = 4.0
_POOL_WEIGHT = 8.0  # trials that the pooled hazard is worth at each depth
_WINDOW = 12.0  # outcomes after which a surprise counts half
_CHANGE = 3.5  # standard deviations of a surprise that is no chance any more
_APART = 8.0  # sequences of a batch that count as independent, at most: texts begin together
_AFTER_CHANGE = 4.0  # trials that the past weighs after a change

SUREST = 12.0  # of a confidence; beyond it all are equally sure
LOWEST = -40.0  # log-odds of a guess; less is no different
_START = np.array([0.0, 1.0, 0.5])  # the weights: the prior is right, and confidence tells a little
_DEVIATION = 0.5  # of the weights about their start
_MEMORY = 2000.0  # guesses after which information counts half
_BATCH, _LARGE_BATCH = 48, 144  # guesses that are gathered for one Newton step: at first, later
_KNOWN = 480.0  # guesses, after which the weights hardly move
_MOST_AT_ONCE = 96  # guesses that are added at once, about
_SECOND_BEST = 0.02  # what the newest first wrong guess counts, of those whose second-best is known
_SPREAD_MEMORY = 500.0  # confidences that mean and deviation are taken over


class AcceptanceEstimate:
    """How a proposal fares by depth: was a guess offered there, and was it right?

    A mismatch is the event of a survival analysis and the end of what was tried is censoring, so a
    short proposal is no evidence against the depths it never reached. Proposers that often have
    nothing to say (n-grams) are described by the offering rates. When the wrong guesses of the last
    few rounds are far from what was expected, the past loses its weight.
    """

    def __init__(self, k_max: int, *, trees: bool = False) -> None:
        """`trees`: guesses are nodes, the likeliest first, and chances are those to be accepted,
        whatever became of others: the expected tokens of the first nodes are their sum."""
        self._depths, self._trees = np.arange(k_max), trees
        # What is known of all depths counts so much at each: of the likeliest first, fewer and
        # fewer are accepted.
        self._shape = 1.0 / (1.0 + self._depths) if trees else np.ones(k_max)
        # By depth, fading: guesses tried, and the wrong ones; sequences that k allowed a guess, and
        # those that were offered one.
        self._trials, self._wrong = np.zeros((2, k_max))
        self._asked, self._offered = np.ones((2, k_max))
        self.rejection = _PRIOR_REJECTION  # pooled over depths
        self._weight = _PRIOR_TRIALS
        self.surprise = Surprise()
        self.changes = 0  # how often the world was found to be another

    def update(self, k: int, outcomes: Sequence[Outcome], rounds: int = 1) -> None:
        """Learn from the outcomes of so many rounds at `k`."""
        k, n, depths = min(k, len(self._depths)), len(outcomes), self._depths[:, None]
        if not k or not n:
            return
        given, known, right = np.minimum(np.array([o[:3] for o in outcomes]).T, k)
        if self._trees:
            hits = [node for o in outcomes for node in _accepted(o) if node < len(self._depths)]
            tried = (known > depths).sum(1)
            wrong = tried - np.bincount(hits, minlength=len(tried))
        else:
            tried, wrong = (known > depths).sum(1), ((right == depths) & (known > depths)).sum(1)
        hazards = 1.0 - self.chances()
        expected = float(tried @ hazards)
        variance = float(tried @ (hazards * (1.0 - hazards)))
        fade = np.where(self._depths < k, 0.5 ** min(n / _HALF_LIFE, rounds / _ROUNDS), 1.0)
        self._trials, self._wrong = self._trials * fade + tried, self._wrong * fade + wrong
        self._asked = self._asked * fade + n * (self._depths < k)
        self._offered = self._offered * fade + (given > depths).sum(1)
        self._pool(float(tried @ self._shape), float(tried @ self._shape - (tried - wrong).sum()))
        variance *= max(1.0, n / rounds / _APART)
        if not self._trees and self.surprise.add(float(wrong.sum()), expected, variance, n):
            self.doubt(_AFTER_CHANGE)
            self.rejection = min(max(self.rejection * self.surprise.ratio, 0.01), 0.95)
            self.surprise = Surprise()
            self.changes += 1

    def agree(self, stretches: Sequence[Sequence[bool]]) -> None:
        """Learn from guesses that were compared in hindsight, for positions in a row: what rounds
        of the longest proposals would have shown there."""
        k = len(self._depths)
        outcomes = [outcome for stretch in stretches for outcome in _rounds(stretch, k)]
        self.update(k, outcomes, len(outcomes))

    def _pool(self, trials: float, wrong: float) -> None:
        if trials:
            weight = self._weight * 0.5 ** (trials / (2 * _HALF_LIFE))
            self._weight = weight + trials
            self.rejection = (self.rejection * weight + wrong) / self._weight

    def doubt(self, trials: float) -> None:
        """Let the past weigh at most this many trials per depth, so that news can overturn it."""
        for count, total in ((self._wrong, self._trials), (self._offered, self._asked)):
            count *= trials / np.maximum(total, trials)
            np.minimum(total, trials, out=total)
        self._weight = min(self._weight, trials)

    def chances(self) -> Array:
        """For each depth: the chance that a guess there is right, all before it being right."""
        pooled = _POOL_WEIGHT * (1.0 - (1.0 - self.rejection) * self._shape)
        hazards = (self._wrong + pooled) / (self._trials + _POOL_WEIGHT)
        found: Array = 1.0 - np.clip(hazards, 0.005, 0.999 if self._trees else 0.98)
        return found

    def alive(self, chances: Array) -> Array:
        """`[..., depth]`: from such `chances` those that a guess is accepted."""
        return chances if self._trees else np.multiply.accumulate(chances, axis=-1)

    def offering(self) -> Array:
        """For each depth: the chance that a guess is offered there."""
        found: Array = self._offered / self._asked
        return found


class Surprise:
    """Wrong guesses of the last rounds against the expected number of them."""

    def __init__(self) -> None:
        self._found, self._expected, self._variance = 0.0, 0.0, 0.0

    @property
    def ratio(self) -> float:
        return self._found / max(self._expected, 1e-9)

    def add(self, found: float, expected: float, variance: float, outcomes: int) -> bool:
        """Wrong guesses `found` and `expected` among so many outcomes, with the latter's variance.
        Whether they differ by more than chance."""
        keep = 0.5 ** (outcomes / _WINDOW)
        self._found = self._found * keep + found
        self._expected = self._expected * keep + expected
        self._variance = self._variance * keep * keep + variance
        chance: float = (self._variance + 0.5) ** 0.5
        return abs(self._found - self._expected) > _CHANGE * chance


def _accepted(outcome: Outcome) -> Sequence[int]:
    return range(outcome.right) if outcome.path is None else outcome.path


def _rounds(stretch: Sequence[bool], k: int) -> list[Outcome]:
    """What proposals of `k` guesses each, one behind the other, would have come to."""
    found, right = list[Outcome](), 0
    for hit in stretch:
        if hit and right < k:
            right += 1
        else:  # a wrong guess, or the token behind a proposal that was all right
            found.append(Outcome(k, min(right + 1, k), right))
            right = 0
    return [*found, Outcome(k, right, right)] if right else found


class Calibration:
    """`line` turns confidences into log-odds; `learn` fits it to what became of guesses."""

    def __init__(self) -> None:
        self._weights = _START.copy()
        self._information = np.eye(3) / _DEVIATION**2
        self._mean, self._variance, self._seen = 1.5, 2.0, 8.0
        self._gathered: list[Guess] = []

    def line(self, odds: Array) -> tuple[Array, float]:
        """Bases and a weight: the log-odds of a guess are base + weight * confidence, of which no
        more than `SUREST` counts. A base for each of the `odds`, the log-odds of the priors."""
        w0, w1, w2 = self._weights.tolist()
        weight = w2 / self._variance**0.5
        return w0 - weight * self._mean + w1 * odds, weight

    def learn(self, guesses: Iterable[Guess]) -> None:
        """Fits once enough are gathered."""
        self._gathered += guesses
        if len(self._gathered) >= (_BATCH if self._seen < _KNOWN else _LARGE_BATCH):
            self._fit(*np.array(self._gathered).T)
            self._gathered = []

    def _fit(self, odds: Array, confidences: Array, hits: Array) -> None:
        """One Newton step."""
        confidences = np.minimum(confidences, SUREST)
        self._spread(confidences)
        count = len(confidences)
        scaled = (confidences - self._mean) / self._variance**0.5
        x = np.column_stack((np.ones(count), odds, scaled))
        p = 1.0 / (1.0 + np.exp(-(x @ self._weights)))
        keep = 0.5 ** (count / _MEMORY)
        prior = (1.0 - keep) / _DEVIATION**2
        new = (x * (p * (1.0 - p))[:, None]).T @ x
        self._information = keep * self._information + prior * np.eye(3) + new
        gradient = x.T @ (hits - p) + prior * (_START - self._weights)
        step = np.linalg.solve(self._information, gradient)
        self._weights = np.clip(self._weights + step, (-3.0, 0.0, 0.0), (3.0, 2.0, 4.0))

    def _spread(self, confidences: Array) -> None:
        """Mean and variance follow what is seen."""
        count = len(confidences)
        rate = count / (min(self._seen, _SPREAD_MEMORY) + count)
        self._seen += count
        shift = float(confidences.mean()) - self._mean
        self._mean += rate * shift
        inside = float(((confidences - self._mean) ** 2).mean())
        self._variance += rate * (inside - self._variance)
        self._variance = max(self._variance, 1e-3)


class ProposalModel:
    """All that is known of the main proposer's guesses. `remember` proposals when they are made,
    `add` what became of them and `learn` from several steps, `refresh` before a choice. `chances`
    `[sample, depth]`: that a guess is right, all before it being right."""

    def __init__(self, k_max: int, *, trees: bool = False) -> None:
        self.acceptance, self._trees = AcceptanceEstimate(k_max, trees=trees), trees
        self.chances = np.zeros((1, k_max))
        self._k_max = k_max
        self._calibration = Calibration()
        self.second = 0.3  # chance that the second-best guess is right behind the first wrong one
        self._k = self.num_added = self.num_heard = 0  # of added steps; with guesses
        self._outcomes: list[Outcome] = []
        self._confidences: list[Sequence[float]] = []
        self._sample = np.full((_SAMPLE, k_max), np.nan)  # a ring; NaN behind a proposal's end
        self._next = self._num_sampled = 0
        self._odds = [0.0] * k_max  # log-odds of the acceptance by depth
        self._bases, self.confidence_weight = [0.0] * k_max, 0.0
        self.refresh()

    def refresh(self) -> None:
        """Bring `chances` up to date. At each depth the log-odds are shifted until the mean over
        the sample is what outcomes say; where a proposal ended before, that mean stands."""
        chances = self.acceptance.chances()
        odds, sample = np.log(chances / (1.0 - chances)), self._sample[: max(self._num_sampled, 1)]
        self._odds = odds.tolist()
        bases, self.confidence_weight = self._calibration.line(odds)
        known = ~np.isnan(sample)
        z = np.where(known, bases + self.confidence_weight * np.minimum(sample, SUREST), odds)
        right = 1.0 / (1.0 + np.exp(-z))
        reached = 1.0 if self._trees else np.cumprod(right, axis=1) / right  # all before it right
        weight = np.where(known, reached, 0.0) + 1e-12
        mean = np.clip((weight * right).sum(0) / weight.sum(0), 1e-5, 1 - 1e-5)
        shift = odds - np.log(mean / (1.0 - mean))
        self._bases = (bases + shift).tolist()
        self.chances = 1.0 / (1.0 + np.exp(-np.where(known, z + shift, z)))

    def survival(self, confidences: Sequence[float]) -> list[float]:
        """By depth: the chance that this proposal's guess is accepted."""
        alive, found, weight = 1.0, list[float](), self.confidence_weight
        for base, confidence in zip(self._bases, confidences, strict=False):
            z = base + weight * (confidence if confidence < SUREST else SUREST)
            alive = (1.0 if self._trees else alive) / (1.0 + exp(-z if z > LOWEST else -LOWEST))
            found.append(alive)
        return found

    def second_best(self, alive: Sequence[float]) -> list[float]:
        """By depth, where guesses are accepted with these chances: that the second-best is
        accepted instead."""
        return [self.second * (before - after) for before, after in pairwise([1.0, *alive])]

    def learn_second_best(self, found: Sequence[bool]) -> None:
        for right in found:
            self.second += _SECOND_BEST * (right - self.second)

    def remember(self, confidences: Confidences) -> None:
        """Take some of the proposals that were just made into the sample."""
        for sure in islice(confidences, _LATEST):
            row = self._sample[self._next]
            row[: len(sure)], row[len(sure) :] = sure, np.nan
            self._next = (self._next + 1) % _SAMPLE
            self._num_sampled = min(self._num_sampled + 1, _SAMPLE)

    def add(self, k: int, outcomes: Sequence[Outcome], confidences: Confidences) -> None:
        """What became of a step's guesses at `k`, to be learnt from by the next `learn`; at 0 only
        the number of steps counts."""
        if k and k != self._k:
            self.learn()
            self._k = k
        self.num_added += 1
        self.num_heard += k > 0
        self._outcomes += outcomes
        self._confidences += confidences

    def learn(self) -> None:
        """From all steps that were added since the last time."""
        self.acceptance.update(self._k, self._outcomes, max(self.num_heard, 1))
        guesses = (
            (odds, sure, depth in _accepted(outcome))
            for outcome, found in zip(self._outcomes, self._confidences, strict=False)
            for depth, (odds, sure) in enumerate(zip(self._odds, found[: outcome.tried]))  # noqa: B905
        )
        self._calibration.learn(islice(guesses, _MOST_AT_ONCE))
        self._outcomes, self._confidences, self.num_added, self.num_heard = [], [], 0, 0

    def learn_in_hindsight(self, agreements: Sequence[Sequence[tuple[float, bool]]]) -> None:
        """From guesses that were compared with what was generated while K was 0. Each position
        behind a wrong guess would have begun another proposal."""
        self.acceptance.agree([[hit for _, hit in stretch] for stretch in agreements])
        for stretch in agreements:
            self._calibration.learn((self._odds[0], *guess) for guess in stretch)
            sure = [confidence for confidence, _ in stretch]
            starts = [0, *(i + 1 for i, (_, hit) in enumerate(stretch) if not hit)]
            rows = [sure[start : start + self._k_max] for start in starts]
            self.remember([row for row in rows if row])
