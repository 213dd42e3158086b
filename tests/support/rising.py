"""Weighted isotonic regression, by its min-max definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rising(numbers: Floats, trust: Floats) -> Floats:
    """Return the non-decreasing fit with the least squares weighted by `trust`: at place i, the
    max over a <= i of the min over b >= i of the weighted mean of numbers a..b."""
    some = range(len(numbers))

    def mean(first: int, last: int) -> float:
        here = slice(first, last + 1)
        return float(np.average(numbers[here], weights=trust[here]))

    return np.array([max(min(mean(a, b) for b in some[i:]) for a in some[: i + 1]) for i in some])
