"""Medians of paired ratios, with bootstrap confidence intervals (Efron 1979)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the percentile interval of its bootstrap. With few values that interval is
    hardly more than their range."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value; the same values give the same interval."""
    rng = random.Random(0)
    found = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = found[int(tail * RESAMPLES)], found[int((1 - tail) * RESAMPLES) - 1]
    return Estimate(median(values), low, high)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Ours over theirs, round by round, over the rounds that both were in."""
    return estimate([a / b for a, b in zip(ours, theirs, strict=False)])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, values)))
