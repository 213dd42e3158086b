"""Scenario: a pair under one load; the time of a round, its speed-up, the best K."""

from __future__ import annotations

from dataclasses import dataclass

from engine.lab.plan import closed_forms
from engine.lab.plan.roofline import Served


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` sequences decode together with `context` tokens each. `draft` None: guesses that
    cost nothing (n-gram lookup, predictions)."""

    target: Served
    draft: Served | None
    batch: int
    context: int

    def target_seconds(self, k: int) -> float:
        """One target pass over a committed token and `k` guesses of every sequence."""
        return self.target.forward(batch=self.batch, tokens=k + 1, context=self.context).seconds

    @property
    def draft_seconds(self) -> float:
        """One draft step: one token for every sequence."""
        if self.draft is None:
            return 0.0
        return self.draft.forward(batch=self.batch, tokens=1, context=self.context).seconds

    @property
    def draft_cost(self) -> float:
        """A draft step in units of a plain target step: Leviathan's c."""
        return self.draft_seconds / self.target_seconds(0)

    def round_cost(self, k: int) -> float:
        """A round with `k` guesses in units of a plain target step."""
        return (k * self.draft_seconds + self.target_seconds(k)) / self.target_seconds(0)

    def speed_up(self, acceptance: float, k: int) -> float:
        """Tokens per second against plain decoding."""
        return closed_forms.expected_tokens(acceptance, k) / self.round_cost(k)

    def best(self, acceptance: float, k_max: int) -> tuple[int, float]:
        """The best K of 0..k_max and its speed-up; K = 0 is 1.0."""
        return closed_forms.best(lambda k: self.speed_up(acceptance, k), k_max)

    def break_even(self, k: int) -> float | None:
        """The least acceptance at which `k` guesses pay; None if none does."""
        return closed_forms.break_even(k, self.round_cost(k))

    @property
    def models(self) -> tuple[Served, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def weight_bytes(self) -> float:
        return sum(model.weight_bytes for model in self.models)

    @property
    def cache_bytes(self) -> float:
        """Keys and values of all sequences, of target and draft."""
        return self.batch * sum(model.cache_bytes(self.context) for model in self.models)

    @property
    def fits(self) -> bool | None:
        """Whether weights and cache fit the memory; None if that is not known."""
        memory = self.target.device.memory
        return None if memory is None else self.weight_bytes + self.cache_bytes <= memory
