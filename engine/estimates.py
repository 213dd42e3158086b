"""What the controller learns: how guesses fare by depth, and what a step of a given size costs.

Both fade, so both follow a changing world. Pure arithmetic over numbers that are passed in; what
to do with the estimates is `controller`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from math import exp, log

Points = Sequence[tuple[int, float]]  # (size, seconds), from a start-up profile

_HALF_LIFE = 192.0  # sequence-rounds after which old acceptance counts half
_PRIOR_REJECTION = 0.3
_PRIOR_TRIALS = 4.0
_POOL_WEIGHT = 8.0  # trials that the pooled hazard is worth at each depth
_OUTLIER = 0.7  # log-seconds beyond which an observation is clipped
_COMMON_RATE, _RESIDUAL_RATE = 0.1, 0.05
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
    for (proposed, accepted), times in Counter(outcomes).items():
        for j in range(min(proposed, k)):
            offered[j] += times
        for j in range(min(accepted + 1, k)):
            reached[j] += times
        for j in range(min(accepted + 1, proposed, k)):
            checked[j] += times
        if accepted < min(proposed, k):
            rejected[accepted] += times
    return offered, reached, checked, rejected


class CostCurve:
    """Seconds by size: a profile, linear between its points, times what it got wrong.

    The correction has a factor for all sizes within a group (a group is a batch size; heat,
    neighbours, context and the work per sequence land here) and one for each power of two of the
    size in that group, interpolated where none was seen. Corrections are logarithms.
    """

    def __init__(self, points: Points = ((1, 1e-5),)) -> None:
        self.set_profile(points)

    def set_profile(self, points: Points) -> None:
        """Start over from measured points; a single one means a flat curve."""
        table = sorted((size, max(seconds, 1e-7)) for size, seconds in points)
        if len(table) == 1:
            table.append((table[0][0] + 1, table[0][1]))
        self._sizes = [size for size, _ in table]
        self._seconds = [seconds for _, seconds in table]
        self._common: dict[int, float] = {}
        self._latest = 0.0  # the correction of the group seen last, for groups not seen yet
        self._residuals: dict[int, dict[int, float]] = {}  # by group, then power of two
        self._visits: dict[tuple[int, int], int] = {}

    def _base(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        i = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return max(seconds[i] + slope * (size - sizes[i]), 0.5 * seconds[0])

    def predict(self, size: float, group: int) -> float:
        correction = self._common.get(group, self._latest)
        residuals = self._residuals.get(group)
        if residuals:
            correction += _interpolated(residuals, int(size).bit_length())
        return self._base(size) * exp(correction)

    def update(self, size: float, group: int, seconds: float) -> None:
        """Learn from one measurement. A size's first ones set its own factor; later, what is common
        is learnt faster, so a slow spell does not make the other sizes look good."""
        power = int(size).bit_length()
        residuals = self._residuals.setdefault(group, {})
        error = log(max(seconds, 1e-7) / self.predict(size, group))
        visits = self._visits.get((group, power), 0) + 1
        self._visits[group, power] = visits
        if visits > 1:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        residual = _interpolated(residuals, power) if residuals else 0.0
        if residuals:
            rate = max(_RESIDUAL_RATE, 1.0 / visits)
            residual += rate * error
            step = (1.0 - rate) * _COMMON_RATE
        else:
            step = 1.0
        residuals[power] = residual
        self._latest = self._common.get(group, self._latest) + step * error
        self._common[group] = self._latest


def _interpolated(table: dict[int, float], key: int) -> float:
    """The value at `key`, between its neighbours', or the nearest one's."""
    if key in table:
        return table[key]
    below = max((k for k in table if k < key), default=None)
    above = min((k for k in table if k > key), default=None)
    if below is None or above is None:
        return table[next(k for k in (below, above) if k is not None)]
    share = (key - below) / (above - below)
    return table[below] + share * (table[above] - table[below])


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
