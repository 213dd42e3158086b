"""DraftTrial: compares a new draft model with the one that it replaced, at the current load.

Both read the same committed texts, so whether each would have proposed a token is known without
censoring, whichever proposed it. Agreement and costs give each draft's tokens per second at its
best K. The new draft is taken back if it promises less than `_MARGIN` of the old one's rate (if
neither pays: if it agrees less), even with its agreement at the upper bound, three standard
deviations by the tokens on which they differ. After `ENOUGH` tokens it stays. Plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.control.controller import KController, Load

LEAST, ENOUGH = 64, 1024  # tokens before the first verdict; tokens for the last one
_MARGIN = 0.9  # costs are not measured more precisely on a busy machine
_DEVIATIONS = 3.0


class Verdict(NamedTuple):
    """Whether the new draft stays. `words`: the evidence, for the log."""

    stays: bool
    words: str


class DraftTrial:
    def __init__(self, old: KController, new: KController) -> None:
        self._old, self._new = old, new
        self._tokens = self._old_right = self._new_right = self._apart = 0

    def add(self, old: Sequence[bool], new: Sequence[bool]) -> None:
        """Record, for each of some tokens, whether each draft would have proposed it."""
        self._tokens += len(old)
        self._old_right += sum(old)
        self._new_right += sum(new)
        self._apart += sum(a != b for a, b in zip(old, new, strict=True))

    def verdict(self, load: Load) -> Verdict | None:
        """Return the verdict at this load; None if there are too few tokens yet."""
        if self._tokens < LEAST:
            return None
        margin = _DEVIATIONS * self._apart**0.5
        at_most = min((self._new_right + margin) / self._tokens, 1.0)
        shares = self._old_right / self._tokens, self._new_right / self._tokens
        old, most = speedup(self._old, load, shares[0]), speedup(self._new, load, at_most)
        stays = most >= _MARGIN * old and (most > 1.0 or at_most >= shares[0])
        if stays and self._tokens < ENOUGH:
            return None
        new = speedup(self._new, load, shares[1])
        return Verdict(
            stays,
            f"of {self._tokens} tokens it would have proposed {shares[1]:.2f}, the one before"
            f" {shares[0]:.2f}: an estimated {new:.2f} and {old:.2f} times the tokens per second of"
            " no speculation",
        )


def speedup(controller: KController, load: Load, agreement: float) -> float:
    """Return the speed-up over no speculation at the best K for chains in which this share of
    tokens is right, by the known costs; if no costs are known, tokens per step."""
    costs, n, k = controller.costs, load.num_sequences or 1, np.arange(controller.k_max + 1)
    tokens = np.cumsum(agreement**k)
    if not costs.known:
        return float(tokens[-1])
    costs.set_context(load.length() if load.length is not None else None)
    begin, step = costs.drafting(n)
    seconds = costs.by_rows(n, n * len(k))[n * (k + 1)] + begin + step * k
    seconds[0] = costs.plain(n)
    rates = tokens / seconds
    return float(rates.max() / rates[0])
