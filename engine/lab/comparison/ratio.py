"""Estimate a speed-up with its uncertainty.

`median_of`, for few rounds: their median ratio, with a bootstrap percentile interval (Efron 1979).
`ratio`, for many: a ratio of sums, with the jackknife interval of docs/measuring.md (Efron and
Stein 1981: its variance is biased upwards, which is safe).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

RESAMPLES, CONFIDENCE = 2000, 0.95  # of the bootstrap
LEAST = 4  # rounds needed for a jackknife interval
GRID = 10_000  # points of the integral in `t_quantile`


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its interval; `low` is 0 and `high` infinite if there were too few rounds."""

    value: float
    low: float = 0.0
    high: float = math.inf

    @property
    def width(self) -> float:
        """Half the interval's width in the logarithm: roughly, its share of the ratio."""
        return math.log(self.high / self.low) / 2 if self.low else math.inf

    def __str__(self) -> str:
        return f"{self.value:.2f}x" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.low else "")


def median_of(ratios: Sequence[float]) -> Ratio:
    """Return the median of at least one ratio. Deterministic. With few ratios, the interval is
    roughly their range."""
    draws = np.random.default_rng(0).choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(draws, axis=1), (tail, 1 - tail))
    return Ratio(median(ratios), float(low), float(high))


def ratio(
    theirs: Sequence[float], ours: Sequence[float], *, alpha: float, floor: float = 0.0
) -> Ratio:
    """Return the ratio of their seconds to ours; both list the same rounds, at least one. `alpha`:
    how often this interval may miss; `floor`: the measured difference between two equal engines,
    since one engine may be faster than an identical one for its whole lifetime."""
    n, a, b = len(ours), math.fsum(theirs), math.fsum(ours)
    if n < LEAST:
        return Ratio(a / b)
    without = [math.log((a - x) / (b - y)) for x, y in zip(theirs, ours, strict=True)]
    mean = math.fsum(without) / n
    variance = (n - 1) / n * math.fsum((one - mean) ** 2 for one in without)
    factor = math.exp(t_quantile(1 - alpha / 2, n - 1) * math.sqrt(variance) + floor)
    return Ratio(a / b, a / b / factor, a / b * factor)


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t for `share` > 1/2. |t| < tan(angle) * sqrt(freedom) has
    the probability of the integral of cos^(freedom - 1) up to the angle, over that to pi / 2."""
    angles = (np.arange(GRID) + 1) * (math.pi / 2 / GRID)
    inside = np.cumsum(np.cos(angles - angles[0] / 2) ** (freedom - 1))
    angle = np.interp(2 * share - 1, inside / inside[-1], angles)
    return math.tan(angle) * math.sqrt(freedom)
