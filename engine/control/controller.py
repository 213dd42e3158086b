"""Controller: chooses K. The protocol of all controllers, and FixedK, which always uses one K.

AdaptiveK, which estimates, is in `adaptive`. No clock and no randomness: seconds are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.control.acceptance import Confidences
from engine.control.profile import Profile
from engine.messages import Estimates, Reason
from engine.scheduling.step_record import StepRecord

_LIKELIER_THAN_NOT = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the next step: how many sequences will sample, and a function for their mean
    length in tokens. It is slow, so it is called only if needed (None: not known)."""

    num_sequences: int
    length: Callable[[], float] | None = None


class KController(Protocol):
    """Chooses one K for the batch before each step, and learns after it. Decisions: `choose`,
    `keeps_drafting`, `kept_counts`, `branch`, `free_count`; estimates: `plain_seconds`,
    `estimates`, `gain`; inputs: `profile`, `resume`, `update`; `successor`: for another drafter."""

    name: str
    k_max: int

    @property
    def reason(self) -> Reason:
        """Return the reason of the last choice; see messages.Estimates."""
        ...

    @property
    def uses_hindsight(self) -> bool:
        """Whether `update` uses `StepRecord.agreements`."""
        ...

    @property
    def max_speculating(self) -> int | None:
        """Return how many sequences may speculate under the last choice; None: all."""
        ...

    @property
    def drafting(self) -> tuple[float, float]:
        """Return what the main proposer costs if it is asked at all, and what it gains for each
        sequence, in tokens, under the last choice."""
        ...

    def profile(self, measured: Profile) -> None:
        """Take the step costs measured at start; served steps will correct them."""
        ...

    def resume(self) -> None:
        """Called when this controller decides again after an operator's override."""
        ...

    def choose(self, load: Load) -> int:
        """Return K for the next step: the draft steps of the main proposer."""
        ...

    def keeps_drafting(self, confidences: Confidences) -> bool:
        """Whether to run one more draft step. Called between draft steps, if each is a forward of
        its own, with the confidences so far of the sequences that may get more tokens."""
        ...

    def kept_counts(self, confidences: Confidences) -> list[int]:
        """Return, for each drafted sequence, how many of its first tokens are worth a target row.
        Called once per step, after drafting."""
        ...

    @property
    def branches(self) -> bool:
        """Whether `branch` may return something in the next step."""
        ...

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        """Return, for each sequence, the places among its kept tokens at which the second-best
        token is worth a row too, best first. Called after `kept_counts`."""
        ...

    def free_count(self, survival: Sequence[float]) -> tuple[int, float]:
        """Return how many tokens of a free proposal pay for one sequence, and what they gain, in
        tokens. `survival`: for each token, the chance that it and all before it are accepted."""
        ...

    def plain_seconds(self, sequences: int, context: int) -> float:
        """Return the estimated seconds of a step without speculation for `sequences` sequences with
        `context` tokens in total; 0 if the costs are not known."""
        ...

    def estimates(self) -> Estimates:
        """Return a new object with the estimates of the last choice, for the front end."""
        ...

    def update(self, record: StepRecord) -> None:
        """Learn from the step after the last choice."""
        ...

    def gain(self, load: Load, agreement: float) -> float:
        """Return the speed-up over no speculation at the best K for chains in which this share of
        tokens is right, by the known costs; if no costs are known, tokens per step."""
        ...

    def successor(self, measured: Profile | None, *, stops: bool) -> KController:
        """Return a controller for another drafter with the step costs `measured` (None: the same
        costs). It keeps what is known of target and host, but nothing of the old proposals.
        `stops`: see build_controller."""
        ...


class FixedK:
    """The same K in every step; 0 is plain decoding. The baseline of every benchmark. It knows no
    costs: it prefers a free proposal to the main proposer if the first token is likely right."""

    name = "fixed"
    uses_hindsight = False
    branches = True
    max_speculating: int | None = None
    drafting = 0.0, 0.0

    def __init__(self, k: int) -> None:
        self.k_max = k
        self.reason: Reason = "fixed" if k else "off"

    def profile(self, measured: Profile) -> None:
        return None

    def resume(self) -> None:
        return None

    def choose(self, load: Load) -> int:
        return self.k_max

    def keeps_drafting(self, confidences: Confidences) -> bool:
        return True

    def kept_counts(self, confidences: Confidences) -> list[int]:
        return [len(sure) for sure in confidences]

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        return [[*range(length)] for length in kept]

    def free_count(self, survival: Sequence[float]) -> tuple[int, float]:
        return min(len(survival), self.k_max), survival[0] - _LIKELIER_THAN_NOT

    def plain_seconds(self, sequences: int, context: int) -> float:
        return 0.0

    def estimates(self) -> Estimates:
        return Estimates(k=self.k_max, reason=self.reason)

    def update(self, record: StepRecord) -> None:
        return None

    def gain(self, load: Load, agreement: float) -> float:
        return sum(agreement**depth for depth in range(self.k_max + 1))

    def successor(self, measured: Profile | None, *, stops: bool) -> FixedK:
        return FixedK(self.k_max)
