"""The K of the best expected rate, with hysteresis between K = 0 and above, since a rate is an
estimate and a change has a cost."""

from __future__ import annotations

from collections.abc import Sequence

# Speed-up that turns it on, and in a crowd: less may be an error of the estimates.
_CLEAR, _CLEAR_CROWD = 1.03, 1.06
# And of K = 0, that turns it off while the batch is new: there it does not see what it misses.
_DARK = 1.02


def best_of(rates: Sequence[float], *, on: bool, crowd: bool, known: bool) -> int:
    """Of a batch of the same size as before: K is above 0 now (`on`), and whether the sizes of what
    it would gain are `known`. `rates` by K."""
    best = best_now(rates)
    if best and not on and rates[best] < (_CLEAR_CROWD if crowd else _CLEAR) * rates[0]:
        return 0
    if not best and on and rates[0] < (1.0 if known else _DARK) * max(rates[1:]):
        return best_above(rates)
    return best


def best_now(rates: Sequence[float]) -> int:
    """Whatever it was before."""
    return max(range(len(rates)), key=rates.__getitem__)


def best_above(rates: Sequence[float]) -> int:
    """But for K = 0."""
    return max(range(1, len(rates)), key=rates.__getitem__)
