"""Kept: how guesses fared lately, by position, as counted and not as estimated."""

from __future__ import annotations

from collections.abc import Sequence

from server.regret import MEMORY_STEPS


class Kept:
    """Fading sums over the last `memory_steps` steps that had guesses."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._keep = 1.0 - 1.0 / memory_steps
        self._proposed: list[float] = []  # [position]
        self._accepted: list[float] = []

    def observe(self, proposed_at: Sequence[int], accepted_at: Sequence[int]) -> None:
        """One step; see messages.StepMetrics."""
        if not proposed_at:
            return
        for sums, counts in ((self._proposed, proposed_at), (self._accepted, accepted_at)):
            sums += [0.0] * (len(counts) - len(sums))
            sums[:] = [
                total * self._keep + (counts[i] if i < len(counts) else 0)
                for i, total in enumerate(sums)
            ]

    @property
    def shares(self) -> list[float]:
        """[position]: of the guesses that were verified there, the share that was kept. Ends where
        hardly any were verified."""
        found = []
        for proposed, accepted in zip(self._proposed, self._accepted, strict=True):
            if proposed < 1.0:
                break
            found.append(accepted / proposed)
        return found
