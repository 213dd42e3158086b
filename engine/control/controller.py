"""Controller: chooses K. The protocol of all controllers, and FixedK, which always uses one K.

AdaptiveK, which estimates, is in `adaptive`. No clock and no randomness: seconds are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

from engine.control.acceptance import Confidences
from engine.control.cost_model import CostModel
from engine.messages import Estimates, Reason
from engine.scheduling.step_record import StepRecord

_LIKELIER_THAN_NOT = 0.5


class Load(msgspec.Struct, frozen=True):
    """The load of the next step: how many sequences will sample, and a function for their mean
    length in tokens. It is slow, so it is called only if needed (None: not known). `resumed`: the
    controller decides again after an operator's override."""

    num_sequences: int
    length: Callable[[], float] | None = None
    resumed: bool = False


class Choice(msgspec.Struct, frozen=True):
    """The choice for one step. `k`: the draft steps of the main proposer; `reason`: see
    messages.Estimates; `max_speculating`: how many sequences may speculate (None: all);
    `branches`: whether `branch` may return something; `uses_hindsight`: whether `update` uses
    `StepRecord.hindsight`. In tokens: `drafting`, what the main proposer costs if it is asked at
    all, and what it gains for each sequence; `row_costs`, what 1, 2, ... draft tokens of one
    sequence cost (empty: not known)."""

    k: int = 0
    reason: Reason = "off"
    max_speculating: int | None = None
    branches: bool = False
    uses_hindsight: bool = False
    drafting: tuple[float, float] = 0.0, 0.0
    row_costs: Sequence[float] = ()

    def free_count(self, survival: Sequence[float]) -> tuple[int, float]:
        """Return how many tokens of a free proposal pay for one sequence, and what they gain, in
        tokens. `survival`: for each token, the chance that it and all before it are accepted. If
        costs are not known, a row costs half a token, and the first one must pay."""
        if not self.row_costs:
            gain = sum(max(chance - _LIKELIER_THAN_NOT, 0.0) for chance in survival)
            return len(survival), gain or survival[0] - _LIKELIER_THAN_NOT
        own = zip(accumulate(survival), self.row_costs, strict=False)
        gains = [value - cost for value, cost in own]
        most = max(gains, default=0.0)
        return (gains.index(most) + 1, most) if most > 0.0 else (0, 0.0)


class KController(Protocol):
    """Chooses one K for the batch before each step, and learns after it. `costs`: of steps, as
    measured at start and corrected by served steps."""

    name: str
    k_max: int
    costs: CostModel

    def choose(self, load: Load) -> Choice:
        """Return the choice for the next step."""

    def keeps_drafting(self, confidences: Confidences) -> bool:
        """Whether to run one more draft step. Called between draft steps, if each is a forward of
        its own, with the confidences so far of the sequences that may get more tokens."""

    def kept_counts(self, confidences: Confidences) -> list[int]:
        """Return, for each drafted sequence, how many of its first tokens are worth a target row.
        Called once per step, after drafting."""

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        """Return, for each sequence, the places among its kept tokens at which the second-best
        token is worth a row too, best first. Called after `kept_counts`."""

    def update(self, record: StepRecord) -> None:
        """Learn from the step after the last choice."""

    def estimates(self) -> Estimates:
        """Return a new object with the estimates of the last choice, for the front end."""


class FixedK:
    """The same K in every step, whatever it costs; 0 is plain decoding. A benchmark's baseline."""

    name = "fixed"

    def __init__(self, k: int) -> None:
        self.k_max, self.costs = k, CostModel()
        self.choice = Choice(k, "fixed" if k else "off", branches=True)

    def choose(self, load: Load) -> Choice:
        return self.choice

    def keeps_drafting(self, confidences: Confidences) -> bool:
        return True

    def kept_counts(self, confidences: Confidences) -> list[int]:
        return [len(own) for own in confidences]

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        return [[*range(length)] for length in kept]

    def update(self, record: StepRecord) -> None:
        return None

    def estimates(self) -> Estimates:
        return Estimates(k=self.k_max, reason=self.choice.reason)
