"""The nearest numbers that never fall, by their definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rising(numbers: Floats, trust: Floats) -> Floats:
    """By squares weighted with `trust`: of each place, the most over all that begin at or before
    it of the least over all that end at or behind it, of their means."""
    some = range(len(numbers))

    def mean(first: int, last: int) -> float:
        here = slice(first, last + 1)
        return float(np.average(numbers[here], weights=trust[here]))

    return np.array([max(min(mean(a, b) for b in some[i:]) for a in some[: i + 1]) for i in some])
