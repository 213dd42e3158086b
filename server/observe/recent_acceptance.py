"""RecentAcceptance: how guesses fared lately, by position, as counted and not as estimated."""

from __future__ import annotations

from collections.abc import Sequence

from server.observe.regret import HEAVY, MEMORY_STEPS


class RecentAcceptance:
    """Fading sums over the last `memory_steps` steps that had guesses. Instead of all that was
    counted, fading, what is counted weighs more with every step."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory_steps)
        self._weight = 1.0
        self._proposed: list[float] = []  # [position]
        self._accepted: list[float] = []

    def observe(self, proposed_at: Sequence[int], accepted_at: Sequence[int]) -> None:
        """One step; see messages.StepMetrics."""
        if not proposed_at:
            return
        self._weight = weight = self._weight * self._growth
        if len(proposed_at) > len(self._proposed):
            more = [0.0] * (len(proposed_at) - len(self._proposed))
            self._proposed, self._accepted = self._proposed + more, self._accepted + more
        for i, count in enumerate(proposed_at):
            self._proposed[i] += count * weight
        for i, count in enumerate(accepted_at):
            self._accepted[i] += count * weight
        if weight > HEAVY:
            self._proposed = [total / weight for total in self._proposed]
            self._accepted = [total / weight for total in self._accepted]
            self._weight = 1.0

    @property
    def shares(self) -> list[float]:
        """[position]: of the guesses that were verified there, the share that was kept. Ends where
        hardly any were verified."""
        found = []
        for proposed, accepted in zip(self._proposed, self._accepted, strict=True):
            if proposed < self._weight:
                break
            found.append(accepted / proposed)
        return found
