"""Steps that were told of and are not learnt from yet. Behind a forward the first one takes several
times what the next ones do, since it drove the code and the numbers for it out of the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.controller import StepObservation
from engine.estimates import Outcome
from engine.experience import Experience
from engine.step_costs import StepCosts


class Lesson(NamedTuple):
    """A step. `outcomes`: those of its that count; `before`: guesses drafted in the step before it,
    see Experience.learn; `rounds`, `fresh`: how its costs are learnt, see StepCosts.learn, and not
    at all if `rounds` is 0."""

    seen: StepObservation
    outcomes: Sequence[Outcome]
    before: int | None
    rounds: int
    fresh: bool


class Lessons:
    """`add` them, and `learn` from all of them in order."""

    def __init__(self, guesses: Experience, costs: StepCosts, *, stops: bool) -> None:
        """`stops`: see AdaptiveK."""
        self._guesses, self._costs, self._stops = guesses, costs, stops
        self._open: list[Lesson] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, lesson: Lesson) -> None:
        self._open.append(lesson)

    def learn(self) -> bool:
        """Whether guesses were found to fare in another way than they did."""
        before = self._guesses.acceptance.changes
        for seen, outcomes, drafted, rounds, fresh in self._open:
            k = seen.k
            if self._stops:  # what was not drafted was not asked for
                k = min(k, max((outcome.offered for outcome in outcomes), default=0))
            self._guesses.learn(k, outcomes, seen, drafted)
            if rounds:
                self._costs.learn(seen, fresh=fresh, rounds=rounds)
        self._open.clear()
        return self._guesses.acceptance.changes != before
