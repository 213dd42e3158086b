"""DraftStop: whether one more draft step is worth its seconds, by the confidences so far."""

from __future__ import annotations

from engine.control.confidence import Array
from engine.control.controller import Confidences
from engine.control.experience import GRID, Experience


class DraftStop:
    """Prices are those of the last choice; before the first nothing is worth a step."""

    def __init__(self, guesses: Experience, k_max: int) -> None:
        self._guesses = guesses
        self._gains = [[0.0] * len(GRID)] * k_max  # by depth: of one more step, see Experience

    def reprice(self, step: float, rows: Array) -> None:
        """In tokens, as `Experience.gains` has them: a sequence's share of a draft step, and rows
        between any two depths."""
        self._gains = self._guesses.gains(step, rows).tolist()

    def pays(self, confidences: Confidences, depth: int) -> bool:
        """For all sequences together, each of which has so many guesses or more."""
        gains, worth = self._gains[depth], 0.0
        for found in self._guesses.chances.lists(confidences):
            place = found[-1] * (len(GRID) - 1)
            i = min(int(place), len(GRID) - 2)
            worth += gains[i] + (place - i) * (gains[i + 1] - gains[i])
        return worth > 0.0
