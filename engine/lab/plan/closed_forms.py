"""The closed forms of speculative decoding (Leviathan et al., arXiv:2211.17192).

`acceptance` is the chance that a guess is kept, given that those before it were; guesses are
independent. Times are in units of one target forward pass over one token per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round with `k` guesses: (1 - a^(k+1)) / (1 - a), from 1 to k+1."""
    return math.fsum(acceptance**i for i in range(k + 1))


def speed_up(acceptance: float, k: int, draft_cost: float, row_cost: float = 0.0) -> float:
    """Tokens per second against plain decoding. `draft_cost`: one draft step; `row_cost`: what each
    guess adds to the verification (0 while that is bound by reading weights)."""
    return expected_tokens(acceptance, k) / (1 + k * (draft_cost + row_cost))


def best(speed: Callable[[int], float], k_max: int) -> tuple[int, float]:
    """The K of 0..k_max with the greatest speed-up, the smallest one of equals, and its speed-up.
    All are looked at: with mixtures of experts the curve has more than one hump."""
    speeds = [speed(k) for k in range(k_max + 1)]
    k = max(range(k_max + 1), key=lambda k: (speeds[k], -k))
    return k, speeds[k]


def break_even(k: int, round_cost: float) -> float | None:
    """The acceptance at which `k` guesses are as fast as none, if a round of them takes
    `round_cost` plain steps; None if not even perfect guesses would pay."""
    if round_cost >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, k) < round_cost:
            low = middle
        else:
            high = middle
    return high
