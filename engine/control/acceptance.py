"""Acceptance: the chance by depth that a draft token is right, refined by the drafter's confidence.

A survival model of the first mismatch, with decaying counts, gives the acceptance by depth. A
logistic regression with three weights, fitted online, refines it by confidence:

    logit P(right) = w0 + w1 logit(prior) + w2 (confidence - mean) / deviation

Confidence and prior are separate inputs, so a useless confidence soon gets no weight. A sample of
recent proposals represents the next ones. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from math import exp

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.step_record import Agreement, Outcome

Array = NDArray[np.float64]
Example = tuple[float, float, bool]  # log-odds of the prior, confidence, was right
Confidences = Sequence[Sequence[float]]  # by sequence, one per draft token in order

_SAMPLE = 64  # recent proposals kept
_LATEST = 8  # maximum proposals of one step that enter the sample
# Half-lives in outcomes and in rounds; data decays by the slower of the two.
_HALF_LIFE, _ROUNDS = 96.0, 32.0
_PRIOR_REJECTION = 0.3
_PRIOR_TOKENS = 4.0
_POOL_WEIGHT = 8.0  # weight of the pooled rejection at each depth, in tokens
_WINDOW = 12.0  # half-life of the counts that it compares, in outcomes
_CHANGE = 3.5  # standard deviations above which acceptance has changed
_MOST_INDEPENDENT = 8.0  # sequences of a batch counted as independent: texts may be alike
_AFTER_CHANGE = 4.0  # weight of the past after a change, in tokens

CAP = 12.0  # maximum confidence that is used
FLOOR = -40.0  # minimum log-odds, so that exp does not overflow
_START = np.array([0.0, 1.0, 0.5])  # initial weights: trust the prior, use confidence a little
_DEVIATION = 0.5  # standard deviation of the weights' prior around _START
_MEMORY = 2000.0  # half-life of information, in tokens
_BATCH, _LARGE_BATCH = 48, 144  # tokens per Newton step: at first, later
_KNOWN = 480.0  # tokens after which the weights hardly change
_MOST_AT_ONCE = 96  # tokens added by one `learn`, about
_SECOND_BEST = 0.02  # weight of the newest outcome of a second-best token
_SPREAD_MEMORY = 500.0  # confidences that mean and deviation are taken over


class AcceptanceEstimate:
    """By depth: how often a token is proposed there, and how often it is right.

    A mismatch is the event of a survival analysis, and the end of the tried tokens is censoring, so
    a short proposal is no evidence about depths that it never reached. Offering rates describe
    proposers that often propose nothing (n-grams). When the number of wrong tokens in recent rounds
    is far from the expected one, the past loses its weight.
    """

    def __init__(self, k_max: int, *, trees: bool = False) -> None:
        """`trees`: draft tokens are nodes, the likeliest first, and each chance is that the node is
        accepted, whatever happens to others: the chances of the first n nodes add up to their
        expected tokens."""
        self._depths, self._trees = np.arange(k_max), trees
        # Shape of the pooled acceptance by depth: in trees, later nodes are accepted less often.
        self._shape = 1.0 / (1.0 + self._depths) if trees else np.ones(k_max)
        # By depth, decaying: tokens tried, and wrong ones; sequences for which k allowed a token,
        # and those that got one.
        self._tried, self._wrong = np.zeros((2, k_max))
        self._asked, self._offered = np.ones((2, k_max))
        self.rejection = _PRIOR_REJECTION  # pooled over depths
        self._weight = _PRIOR_TOKENS
        self.change_detector = ChangeDetector()
        self.changes = 0  # number of detected changes

    def update(self, k: int, outcomes: Sequence[Outcome], rounds: int = 1) -> None:
        """Learn from the outcomes of `rounds` rounds at `k`."""
        k, n, depths = min(k, len(self._depths)), len(outcomes), self._depths[:, None]
        if not k or not n:
            return
        offered, known, right = np.minimum(np.array([o[:3] for o in outcomes]).T, k)
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
        self._tried, self._wrong = self._tried * fade + tried, self._wrong * fade + wrong
        self._asked = self._asked * fade + n * (self._depths < k)
        self._offered = self._offered * fade + (offered > depths).sum(1)
        if pooled := float(tried @ self._shape):
            weight = self._weight * 0.5 ** (pooled / (2 * _HALF_LIFE))
            right, self._weight = float((tried - wrong).sum()), weight + pooled
            self.rejection = (self.rejection * weight + pooled - right) / self._weight
        variance *= max(1.0, n / rounds / _MOST_INDEPENDENT)
        if self._trees:
            return
        if ratio := self.change_detector.add(float(wrong.sum()), expected, variance, n):
            self.limit_weight(_AFTER_CHANGE)
            self.rejection = min(max(self.rejection * ratio, 0.01), 0.95)
            self.change_detector = ChangeDetector()
            self.changes += 1

    def learn_compared(self, agreements: Sequence[Sequence[bool]]) -> None:
        """Learn from tokens compared in hindsight at consecutive positions: from the outcomes that
        rounds with the longest proposals would have had there."""
        k = len(self._depths)
        outcomes = [outcome for hits in agreements for outcome in _rounds(hits, k)]
        self.update(k, outcomes, len(outcomes))

    def limit_weight(self, tokens: float) -> None:
        """Limit the weight of the past to `tokens` per depth, so that news can outweigh it."""
        for count, total in ((self._wrong, self._tried), (self._offered, self._asked)):
            count *= tokens / np.maximum(total, tokens)
            np.minimum(total, tokens, out=total)
        self._weight = min(self._weight, tokens)

    def chances(self) -> Array:
        """Return, by depth, the chance that a token is right if all before it are."""
        pooled = _POOL_WEIGHT * (1.0 - (1.0 - self.rejection) * self._shape)
        hazards = (self._wrong + pooled) / (self._tried + _POOL_WEIGHT)
        chances: Array = 1.0 - np.clip(hazards, 0.005, 0.999 if self._trees else 0.98)
        return chances

    def survival(self, chances: Array) -> Array:
        """Return, `[..., depth]`, the chances that a token is accepted, from such `chances`."""
        return chances if self._trees else np.multiply.accumulate(chances, axis=-1)

    def proposal_rates(self) -> Array:
        """Return, by depth, the chance that a token is proposed."""
        return self._offered / self._asked


class ChangeDetector:
    """Compares the number of wrong tokens in recent rounds with the expected number."""

    def __init__(self) -> None:
        self._found, self._expected, self._variance = 0.0, 0.0, 0.0

    def add(self, wrong: float, expected: float, variance: float, outcomes: int) -> float:
        """Add `wrong` tokens of `outcomes`, with the expected number and its variance. Returns the
        ratio of the two, at least 0.01, if they differ by more than chance, else 0."""
        keep = 0.5 ** (outcomes / _WINDOW)
        self._found = self._found * keep + wrong
        self._expected = self._expected * keep + expected
        self._variance = self._variance * keep * keep + variance
        chance: float = (self._variance + 0.5) ** 0.5
        differ = abs(self._found - self._expected) > _CHANGE * chance
        return max(self._found / max(self._expected, 1e-9), 0.01) if differ else 0.0


def _accepted(outcome: Outcome) -> Sequence[int]:
    return range(outcome.right) if outcome.path is None else outcome.path


def _rounds(hits: Sequence[bool], k: int) -> list[Outcome]:
    """Return the outcomes of consecutive proposals with `k` tokens each."""
    outcomes, right = list[Outcome](), 0
    for hit in hits:
        if hit and right < k:
            right += 1
        else:  # a wrong token, or the target's own token after k right ones
            outcomes.append(Outcome(k, min(right + 1, k), right))
            right = 0
    return [*outcomes, Outcome(k, right, right)] if right else outcomes


class Calibration:
    """`line` converts confidences into log-odds; `learn` fits the conversion to outcomes."""

    def __init__(self) -> None:
        self._weights = _START.copy()
        self._information = np.eye(3) / _DEVIATION**2
        self._mean, self._variance, self._seen = 1.5, 2.0, 8.0
        self._gathered: list[Example] = []

    def line(self, odds: Array) -> tuple[Array, float]:
        """Return (bases, weight): a token's log-odds are base + weight * min(confidence, CAP),
        with one base for each of `odds` (log-odds of the priors)."""
        w0, w1, w2 = self._weights.tolist()
        weight = w2 / self._variance**0.5
        return w0 - weight * self._mean + w1 * odds, weight

    def learn(self, examples: Iterable[Example]) -> None:
        """Gather tokens, and fit once there are enough."""
        self._gathered += examples
        if len(self._gathered) >= (_BATCH if self._seen < _KNOWN else _LARGE_BATCH):
            self._fit(*np.array(self._gathered).T)
            self._gathered = []

    def _fit(self, odds: Array, confidences: Array, hits: Array) -> None:
        """One Newton step."""
        confidences = np.minimum(confidences, CAP)
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
        """Update mean and variance of the confidences."""
        count = len(confidences)
        rate = count / (min(self._seen, _SPREAD_MEMORY) + count)
        self._seen += count
        shift = float(confidences.mean()) - self._mean
        self._mean += rate * shift
        inside = float(((confidences - self._mean) ** 2).mean())
        self._variance = max(self._variance + rate * (inside - self._variance), 1e-3)


class ProposalModel:
    """Models the main proposer's tokens. Call `remember` with new proposals, `add` with their
    outcomes, `learn` to learn from several added steps, `refresh` before a choice. `chances`
    `[sample, depth]`: the chance that a token is right if all before it are."""

    def __init__(self, k_max: int, *, trees: bool = False) -> None:
        self.acceptance, self._trees = AcceptanceEstimate(k_max, trees=trees), trees
        self.chances = np.zeros((1, k_max))
        self._k_max = k_max
        self._calibration = Calibration()
        self.second = 0.3  # chance that the second-best token is right if the best is wrong
        self._k = self.num_steps = self.num_proposing = 0  # steps added; those with proposals
        self._outcomes: list[Outcome] = []
        self._confidences: list[Sequence[float]] = []
        self._sample = np.full((_SAMPLE, k_max), np.nan)  # a ring; NaN after a proposal's end
        self._next = self._num_sampled = 0
        self._odds = [0.0] * k_max  # log-odds of the acceptance by depth
        self._bases, self.confidence_weight = [0.0] * k_max, 0.0
        self.refresh()

    def refresh(self) -> None:
        """Update `chances`. At each depth the log-odds are shifted until the mean chance over the
        sample equals the acceptance; after the end of a proposal the acceptance itself is used."""
        chances = self.acceptance.chances()
        odds, sample = np.log(chances / (1.0 - chances)), self._sample[: max(self._num_sampled, 1)]
        self._odds = odds.tolist()
        bases, self.confidence_weight = self._calibration.line(odds)
        known = ~np.isnan(sample)
        z = np.where(known, bases + self.confidence_weight * np.minimum(sample, CAP), odds)
        right = 1.0 / (1.0 + np.exp(-z))
        reached = 1.0 if self._trees else np.cumprod(right, axis=1) / right  # all before it right
        weight = np.where(known, reached, 0.0) + 1e-12
        mean = np.clip((weight * right).sum(0) / weight.sum(0), 1e-5, 1 - 1e-5)
        shift = odds - np.log(mean / (1.0 - mean))
        self._bases = (bases + shift).tolist()
        self.chances = 1.0 / (1.0 + np.exp(-np.where(known, z + shift, z)))

    def survival(self, confidences: Sequence[float]) -> list[float]:
        """Return, by depth, the chance that this proposal's token is accepted."""
        chance, chances, weight = 1.0, list[float](), self.confidence_weight
        for base, confidence in zip(self._bases, confidences, strict=False):
            z = base + weight * (confidence if confidence < CAP else CAP)
            chance = (1.0 if self._trees else chance) / (1.0 + exp(-z if z > FLOOR else -FLOOR))
            chances.append(chance)
        return chances

    def second_best(self, survival: Sequence[float]) -> list[float]:
        """Return, by depth, the chance that the second-best token is accepted instead, from the
        chances `survival` that tokens are accepted."""
        return [self.second * (before - after) for before, after in pairwise([1.0, *survival])]

    def learn_second_best(self, outcomes: Sequence[bool]) -> None:
        for right in outcomes:
            self.second += _SECOND_BEST * (right - self.second)

    def remember(self, confidences: Confidences) -> None:
        """Put some of the new proposals into the sample."""
        for values in islice(confidences, _LATEST):
            row = self._sample[self._next]
            row[: len(values)], row[len(values) :] = values, np.nan
            self._next = (self._next + 1) % _SAMPLE
            self._num_sampled = min(self._num_sampled + 1, _SAMPLE)

    def add(self, k: int, outcomes: Sequence[Outcome], confidences: Confidences) -> None:
        """Store a step's outcomes at `k` for the next `learn`; at k = 0 only the number of steps
        counts."""
        if k and k != self._k:
            self.learn()
            self._k = k
        self.num_steps += 1
        self.num_proposing += k > 0
        self._outcomes += outcomes
        self._confidences += confidences

    def learn(self) -> None:
        """Learn from all steps added since the previous call."""
        self.acceptance.update(self._k, self._outcomes, max(self.num_proposing, 1))
        examples = (
            (odds, value, depth in _accepted(outcome))
            for outcome, found in zip(self._outcomes, self._confidences, strict=False)
            for depth, (odds, value) in enumerate(zip(self._odds, found[: outcome.tried]))  # noqa: B905
        )
        self._calibration.learn(islice(examples, _MOST_AT_ONCE))
        self._outcomes, self._confidences, self.num_steps, self.num_proposing = [], [], 0, 0

    def learn_in_hindsight(self, agreements: Sequence[Agreement]) -> None:
        """Learn from tokens compared with the text generated at K = 0. After each wrong token a new
        proposal would have begun. Trees count like verified ones."""
        if self._trees:
            for tree in agreements:
                size, hits = len(tree.compared), [n for n, hit in enumerate(tree.hits) if hit]
                values = [confidence for confidence, _ in tree.compared]
                self.add(tree.k, [Outcome(size, size, len(hits), hits)], [values])
            self.learn()
            return
        self.acceptance.learn_compared([found.hits for found in agreements])
        for found in agreements:
            self._calibration.learn((self._odds[0], *each) for each in found.compared)
            values = [confidence for confidence, _ in found.compared]
            starts = [0, *(i + 1 for i, hit in enumerate(found.hits) if not hit)]
            rows = [values[start : start + self._k_max] for start in starts]
            self.remember([row for row in rows if row])
