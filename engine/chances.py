"""How likely the proposals of one round are to be right, while they grow by a guess at a time.

Those of few are handled as lists, which are quicker there than arrays, and what was found is kept
until the round is over: a guess more costs one factor more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import numpy as np

from engine.confidence import LEAST, MOST, Array
from engine.controller import Confidences

FEW = 12  # proposals, up to which lists are quicker


class Chances:
    """That a guess and all before it are right: log-odds = base + weight * confidence, by depth. In
    a round it is asked of the same proposals, which only grow, or of fewer."""

    def __init__(self, k_max: int) -> None:
        self.trust([0.0] * k_max, 0.0)

    def trust(self, bases: Sequence[float], weight: float) -> None:
        """How far confidences go from now on."""
        self.bases, self.weight = bases, weight
        self.restart()

    def restart(self) -> None:
        """Another round: other proposals."""
        self._lists: list[list[float]] = []

    def lists(self, confidences: Confidences) -> list[list[float]]:
        """By proposal, then depth."""
        if len(self._lists) != len(confidences):
            self._lists = [[] for _ in confidences]
        for found, sure in zip(self._lists, confidences, strict=True):
            alive = found[-1] if found else 1.0
            for depth in range(len(found), len(sure)):
                z = self.bases[depth] + self.weight * min(sure[depth], MOST)
                alive /= 1.0 + exp(min(-z, LEAST))
                found.append(alive)
        return self._lists

    def table(self, confidences: Confidences) -> Array:
        """`[proposals, depths]`, 0 where there is no guess."""
        lengths = [len(sure) for sure in confidences]
        most = max(lengths)
        ragged = min(lengths) < most
        if ragged:
            confidences = [[*sure, *[0.0] * (most - len(sure))] for sure in confidences]
        z = np.array(confidences, dtype=float)
        np.minimum(z, MOST, out=z)
        z *= -self.weight
        z -= self.bases[:most]
        np.minimum(z, LEAST, out=z)
        found: Array = 1.0 / (1.0 + np.exp(z))
        if ragged:
            found *= np.arange(most) < np.array(lengths)[:, None]
        return found.cumprod(axis=1) if most > 1 else found
