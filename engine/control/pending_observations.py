"""PendingObservations: steps observed and not learnt from yet. They are learnt from together, since
the first one behind a forward takes several times what the next ones do (cold caches).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.control.controller import Overheard, StepObservation
from engine.control.estimates import Outcome
from engine.control.experience import Experience
from engine.control.step_costs import StepCosts


class PendingObservation(NamedTuple):
    """A step. `outcomes`: those of its that count; `before`: guesses drafted in the step before it,
    see Experience.learn; `rounds`, `fresh`, `cold`: how its costs are learnt, see StepCosts.learn,
    and not at all if `rounds` is 0, though how long its sequences are is."""

    seen: StepObservation
    outcomes: Sequence[Outcome]
    before: int | None
    rounds: float
    fresh: bool
    cold: bool = False


class PendingObservations:
    """`add` them, and `learn` from all of them in order."""

    def __init__(self, guesses: Experience, costs: StepCosts, *, stops: bool) -> None:
        """`stops`: see AdaptiveK."""
        self._guesses, self._costs, self._stops = guesses, costs, stops
        self._open: list[PendingObservation] = []
        # Of rounds that were overheard and asked for as many guesses, to be learnt from together.
        self._outcomes: list[Outcome] = []
        self._k = self._rounds = 0
        self._heard: list[Overheard] = []  # whose costs are not learnt yet

    def __len__(self) -> int:
        return len(self._open)

    def add(self, lesson: PendingObservation) -> None:
        self._open.append(lesson)

    def overhear(self, heard: Overheard) -> None:
        """A round that is no lesson."""
        self._heard.append(heard)
        if not heard.outcomes:
            return
        k = self._asked(heard.k, heard.outcomes)
        if k != self._k:
            self._take_in()
            self._k = k
        self._outcomes += heard.outcomes
        self._rounds += 1

    @property
    def has_heard(self) -> bool:
        """Whether a round was overheard since it last learnt."""
        return bool(self._heard)

    def _take_in(self) -> None:
        self._guesses.acceptance.update(self._k, self._outcomes, self._rounds)
        self._outcomes, self._rounds = [], 0

    def _asked(self, k: int, outcomes: Sequence[Outcome]) -> int:
        """What was not drafted was not asked for."""
        return min(k, max((o.offered for o in outcomes), default=0)) if self._stops else k

    def learn(self, rounds: float = 1.0) -> bool:
        """Whether guesses were found to fare in another way than they did. `rounds`: those that
        were overheard stand for so many."""
        before = self._guesses.acceptance.changes
        self._take_in()
        if self._heard:
            self._costs.overhear(self._heard, max(rounds, len(self._heard)))
            self._heard.clear()
        for seen, outcomes, drafted, rounds, fresh, cold in self._open:
            self._guesses.learn(self._asked(seen.k, outcomes), outcomes, seen, drafted)
            if rounds:
                self._costs.learn(seen, fresh=fresh, rounds=rounds, cold=cold)
            elif seen.is_decode:
                self._costs.reach(seen)
        self._open.clear()
        return self._guesses.acceptance.changes != before
