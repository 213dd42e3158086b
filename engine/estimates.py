"""What the controller learns: how guesses fare by depth, and what a step of a given size costs.

Both fade, so both follow a changing world. Pure arithmetic over numbers that are passed in; what
to do with the estimates is `controller`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

Points = Sequence[tuple[int, float]]  # (size, seconds), from a start-up profile

_HALF_LIFE = 192.0  # sequence-rounds after which old acceptance counts half
_PRIOR_REJECTION = 0.3
_PRIOR_TRIALS = 4.0
_POOL_WEIGHT = 8.0  # trials that the pooled hazard is worth at each depth
_OUTLIER = 0.7  # log-seconds beyond which an observation is clipped
_LINE_KEEP = 0.97  # what a round-old host time still counts


class AcceptanceEstimate:
    """How a proposal fares by depth: was a guess offered there, and was it accepted?

    A mismatch is the event of a survival analysis and the end of the proposal is censoring, so a
    short proposal is no evidence against the depths it never reached. Proposers that often have
    nothing to say (n-grams) are described by the offering rates.
    """

    def __init__(self, k_max: int) -> None:
        self._trials = [0.0] * k_max  # guesses offered and checked at this depth
        self._rejections = [0.0] * k_max
        self._reached = [1.0] * k_max  # all guesses before this depth were accepted, k allowing
        self._offered_if_reached = [1.0] * k_max
        self._asked = [1.0] * k_max  # k allowed a guess at this depth
        self._offered = [1.0] * k_max
        self.rejection = _PRIOR_REJECTION  # pooled over depths
        self._weight = _PRIOR_TRIALS

    def update(self, k: int, outcomes: Sequence[tuple[int, int]]) -> float:
        """Learn from one round at `k`; the number of guesses checked in it."""
        k = min(k, len(self._trials))
        if not k or not outcomes:
            return 0.0
        offered, reached, checked, rejected = _counts(k, outcomes)
        keep = 0.5 ** (len(outcomes) / _HALF_LIFE)
        for j in range(k):
            self._trials[j] = self._trials[j] * keep + checked[j]
            self._rejections[j] = self._rejections[j] * keep + rejected[j]
            if reached[j]:  # else both would fade to nothing, and their ratio with them
                self._reached[j] = self._reached[j] * keep + reached[j]
                self._offered_if_reached[j] = self._offered_if_reached[j] * keep + checked[j]
            self._asked[j] = self._asked[j] * keep + len(outcomes)
            self._offered[j] = self._offered[j] * keep + offered[j]
        trials, events = float(sum(checked)), float(sum(rejected))
        if trials:
            weight = self._weight * 0.5 ** (trials / (2 * _HALF_LIFE))
            self._weight = weight + trials
            self.rejection = (self.rejection * weight + events) / self._weight
        return trials

    def doubt(self, trials: float) -> None:
        """Let the past weigh at most this many trials per depth, so that news can overturn it."""
        for j, present in enumerate(self._trials):
            if present > trials:
                self._trials[j] = trials
                self._rejections[j] *= trials / present
            for count, total in (
                (self._offered_if_reached, self._reached),
                (self._offered, self._asked),
            ):
                if total[j] > trials:
                    count[j] *= trials / total[j]
                    total[j] = trials
        self._weight = min(self._weight, trials)

    def expected(self) -> list[tuple[float, float]]:
        """For each depth: P(a guess is offered), P(it and all before it are accepted)."""
        answer = []
        survival = 1.0
        pooled = _POOL_WEIGHT * self.rejection
        for j, trials in enumerate(self._trials):
            hazard = (self._rejections[j] + pooled) / (trials + _POOL_WEIGHT)
            hazard = min(max(hazard, 0.005), 0.98)
            survival *= (1.0 - hazard) * self._offered_if_reached[j] / self._reached[j]
            answer.append((self._offered[j] / self._asked[j], survival))
        return answer


def _counts(
    k: int, outcomes: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Per depth, sequences: offered a guess; all before accepted; guess checked; rejected."""
    offered, reached, checked, rejected = [0] * k, [0] * k, [0] * k, [0] * k
    for proposed, accepted in outcomes:
        for j in range(min(proposed, k)):
            offered[j] += 1
        for j in range(min(accepted + 1, k)):
            reached[j] += 1
        for j in range(min(accepted + 1, proposed, k)):
            checked[j] += 1
        if accepted < min(proposed, k):
            rejected[accepted] += 1
    return offered, reached, checked, rejected


@dataclass(slots=True)
class CostCurve:
    """Seconds by size: a profile, linear between its points, times one factor for what drifts
    (heat, neighbours, context) and one per size bucket for what the profile got wrong there."""

    sizes: list[int] = field(default_factory=lambda: [1, 2])
    seconds: list[float] = field(default_factory=lambda: [1e-5, 1e-5])
    common: float = 0.0  # log of the factor
    residuals: dict[int, float] = field(default_factory=dict)  # log, by `_bucket`
    seen: int = 0

    def set_profile(self, points: Points) -> None:
        """Start over from measured points; a single one means a flat curve."""
        table = sorted((size, max(seconds, 1e-7)) for size, seconds in points)
        if len(table) == 1:
            table.append((table[0][0] + 1, table[0][1]))
        self.sizes = [size for size, _ in table]
        self.seconds = [seconds for _, seconds in table]
        self.common, self.seen = 0.0, 0
        self.residuals = {}

    def _base(self, size: float) -> float:
        i = min(max(bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        x0, x1, y0, y1 = self.sizes[i - 1], self.sizes[i], self.seconds[i - 1], self.seconds[i]
        return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), 0.5 * self.seconds[0])

    def predict(self, size: float) -> float:
        return self._base(size) * exp(self.common + self.residuals.get(_bucket(size), 0.0))

    def update(self, size: float, seconds: float) -> None:
        """Learn from one measurement. What is common is learnt fast, what is particular to a size
        slowly, so a slow spell does not make the other sizes look good."""
        bucket = _bucket(size)
        residual = self.residuals.get(bucket, 0.0)
        error = log(max(seconds, 1e-7) / self._base(size)) - self.common - residual
        if self.seen:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        self.seen += 1
        self.common += error * max(0.1, 1.0 / self.seen)
        self.residuals[bucket] = residual + 0.05 * error - 0.003 * residual


def _bucket(size: float) -> int:
    """Powers of two."""
    return int(size).bit_length()


class HostCost:
    """Seconds of a step outside the forwards, as a line over the target's rows: packing, sampling
    and acceptance grow with them. Decayed least squares; the slope is never negative."""

    def __init__(self) -> None:
        self.start(0.0)

    def start(self, seconds: float) -> None:
        """Start over from one figure for every size."""
        self._weight, self._x, self._y, self._xx, self._xy = 1.0, 0.0, seconds, 0.0, 0.0

    def update(self, rows: int, seconds: float) -> None:
        if self._weight > 4.0:
            seconds = min(seconds, 3.0 * self.predict(rows) + 1e-4)
        self._weight = self._weight * _LINE_KEEP + 1.0
        self._x = self._x * _LINE_KEEP + rows
        self._y = self._y * _LINE_KEEP + seconds
        self._xx = self._xx * _LINE_KEEP + rows * rows
        self._xy = self._xy * _LINE_KEEP + rows * seconds

    def predict(self, rows: float) -> float:
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        slope = max(0.0, (self._xy / self._weight - x * y) / (spread + 1.0))
        return max(y + slope * (rows - x), 0.0)
