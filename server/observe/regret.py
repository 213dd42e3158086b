"""Regret: what the choices of K cost against the best single K, live.

For each step the controller's expectation says how long the tokens that it brought would take at
every K under that step's load: tokens / rates[K]. Those times are summed, for each K that never
changes and for the K that was chosen, and old steps fade. Both sides are expectations, so what is
seen here is the price of experiments and modes; errors of the estimates are not.
"""

from __future__ import annotations

from engine.messages import Estimates

MEMORY_STEPS = 512
HEAVY = 1e100  # weights are scaled down beyond it


class Regret:
    """`value`: seconds as chosen / seconds at the best single K, minus 1. 0 without estimates."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory_steps)
        self._weight = 1.0  # of the last step: they grow, instead of all sums fading
        self._fixed: list[float] = []  # [k]: weighted seconds
        self._chosen = 0.0

    def observe(self, estimates: Estimates, num_tokens: int) -> None:
        """One step that brought so many tokens."""
        rates, k = estimates.rates, estimates.k
        if k >= len(rates) or min(rates) <= 0.0:
            return
        if len(rates) != len(self._fixed):  # another bound on K: an engine of another kind
            self._fixed, self._chosen = [0.0] * len(rates), 0.0
        self._weight *= self._growth
        fixed, amount = self._fixed, num_tokens * self._weight
        for i, rate in enumerate(rates):
            fixed[i] += amount / rate
        self._chosen += amount / rates[k]
        if self._weight > HEAVY:
            self._fixed = [seconds / self._weight for seconds in fixed]
            self._chosen, self._weight = self._chosen / self._weight, 1.0

    @property
    def value(self) -> float:
        best = min(self._fixed, default=0.0)
        return self._chosen / best - 1.0 if best > 0.0 else 0.0
