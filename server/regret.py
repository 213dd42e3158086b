"""Regret: what the choices of K cost against the best single K, live.

For each step the controller's expectation says how long the tokens that it brought would take at
every K under that step's load: tokens / rates[K]. Those times are summed, for each K that never
changes and for the K that was chosen, and old steps fade. Both sides are expectations, so what is
seen here is the price of experiments and modes; errors of the estimates are not.
"""

from __future__ import annotations

from engine.messages import Estimates

MEMORY_STEPS = 512


class Regret:
    """`value`: seconds as chosen / seconds at the best single K, minus 1. 0 without estimates."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._keep = 1.0 - 1.0 / memory_steps
        self._fixed: list[float] = []  # [k]: seconds, fading
        self._chosen = 0.0

    def observe(self, estimates: Estimates, num_tokens: int) -> None:
        """One step that brought so many tokens."""
        rates, k = estimates.rates, estimates.k
        if k >= len(rates) or min(rates) <= 0.0:
            return
        if len(rates) != len(self._fixed):  # another bound on K: an engine of another kind
            self._fixed, self._chosen = [0.0] * len(rates), 0.0
        self._fixed = [
            seconds * self._keep + num_tokens / rate
            for seconds, rate in zip(self._fixed, rates, strict=True)
        ]
        self._chosen = self._chosen * self._keep + num_tokens / rates[k]

    @property
    def value(self) -> float:
        best = min(self._fixed, default=0.0)
        return self._chosen / best - 1.0 if best > 0.0 else 0.0
