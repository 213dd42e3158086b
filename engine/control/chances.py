"""How likely the proposals of one round are to be right, while they grow by a guess at a time.

What was found is kept until the round is over: a guess more costs one factor more. Lists and plain
arithmetic: so few numbers are handled quicker than arrays, most of all when a forward has just
driven the code for those out of the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from engine.control.confidence import LOWEST, SUREST
from engine.control.controller import Confidences

FEW = 12  # proposals, beyond which one alone weighs little


class Chances:
    """The chances that a guess and all before it are right. By depth, the log-odds of one guess are
    base + weight * confidence. Within a round `lists` is asked of the same proposals, which only
    grow; of another number of them it begins anew."""

    def __init__(self, k_max: int) -> None:
        self.trust([0.0] * k_max, 0.0)

    def trust(self, bases: Sequence[float], weight: float) -> None:
        """What confidences say from now on: a base for each depth, one weight for all."""
        self.bases, self.weight = bases, weight
        self.restart()

    def restart(self) -> None:
        """Another round: other proposals."""
        self._lists: list[list[float]] = []

    def lists(self, confidences: Confidences) -> list[list[float]]:
        """By proposal, then depth: the chance that the guess and all before it are right."""
        if len(self._lists) != len(confidences):
            self._lists = [[] for _ in confidences]
        bases, weight = self.bases, self.weight
        for found, sure in zip(self._lists, confidences, strict=True):
            alive, depth = found[-1] if found else 1.0, len(found)
            for confidence in sure[depth:] if depth else sure:
                z = bases[depth] + weight * (confidence if confidence < SUREST else SUREST)
                alive /= 1.0 + exp(-z if z > -LOWEST else LOWEST)
                found.append(alive)
                depth += 1
        return self._lists
