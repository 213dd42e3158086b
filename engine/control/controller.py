"""Controller: which K pays. What every controller must offer, and the one that obeys (FixedK).

AdaptiveK, the one that decides, is `adaptive`'s. No clock and no randomness in here: seconds are
passed in.
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
    """What the next step faces: how many sequences will sample in it, and how many tokens each of
    them has on average, computed only when called, since counting is slow; None: not known."""

    num_sequences: int
    length: Callable[[], float] | None = None


class KController(Protocol):
    """Chooses one K for the batch before each step, and learns after it. Seven questions: `choose`,
    `goes_on`, `keep`, `worth`, `plain_seconds`, `estimates`, `gain`; `profile`, `resume` and
    `update` tell it something, and `successor` begins anew for another drafter."""

    name: str
    k_max: int

    @property
    def reason(self) -> Reason:
        """Why the last choice; see messages.Estimates."""
        ...

    @property
    def uses_hindsight(self) -> bool:
        """Whether `update` needs `agreements`."""
        ...

    @property
    def max_speculating(self) -> int | None:
        """For how many sequences the last choice is meant; None: for all of them."""
        ...

    def profile(self, measured: Profile) -> None:
        """What steps cost as measured at start; served steps correct it."""
        ...

    def resume(self) -> None:
        """Called when this controller decides again after an operator override."""
        ...

    def choose(self, load: Load) -> int:
        """K for the step ahead: draft steps of the main proposer."""
        ...

    def goes_on(self, confidences: Confidences) -> bool:
        """Whether to draft one step more. Asked between draft steps, where each is a forward of its
        own, with the confidences so far of the sequences that might have more."""
        ...

    def keep(self, confidences: Confidences) -> list[int]:
        """Of each drafted sequence, how many of its guesses, from the first, are worth a row of the
        target. Asked once a round, when all are drafted."""
        ...

    @property
    def branches(self) -> bool:
        """Whether `branch` may have an answer in the step ahead."""
        ...

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        """After `keep`: places among the kept guesses of each at which the second-best one is worth
        a row as well, the best first."""
        ...

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        """How many guesses that cost nothing to make pay, for one sequence of the step, given for
        each its chance to be accepted with all before it. 0 also where the main proposer is the
        better choice, if it may be asked `instead`."""
        ...

    def plain_seconds(self, sequences: int, context: int) -> float:
        """Of a step in which so many sequences, with so many tokens of context among them, get a
        token each without a guess, at the present costs; 0 where these are not known."""
        ...

    def estimates(self) -> Estimates:
        """What it believed at the last choice, for the front end: a new object each time."""
        ...

    def update(self, record: StepRecord) -> None:
        """Learn from the step that the last choice led to."""
        ...

    def gain(self, load: Load, agreement: float) -> float:
        """Tokens per second with chains of guesses of which this share is right, at the best K and
        the costs as known, by those without guesses; where no costs are known, tokens per step."""
        ...

    def successor(self, measured: Profile | None, *, stops: bool) -> KController:
        """For another drafter, whose steps take what is `measured` (None: what this one's take):
        nothing is known of its guesses, all that is known of target and host is. `stops` as of
        build_controller."""
        ...


class FixedK:
    """The same K in every round; 0 is plain decoding. The baseline of every benchmark. It knows no
    costs: free guesses go before the main proposer's where the first is likelier right than not."""

    name = "fixed"
    uses_hindsight = False
    branches = True
    max_speculating: int | None = None

    def __init__(self, k: int) -> None:
        self.k_max = k
        self.reason: Reason = "fixed" if k else "off"

    def profile(self, measured: Profile) -> None:
        return None

    def resume(self) -> None:
        return None

    def choose(self, load: Load) -> int:
        return self.k_max

    def goes_on(self, confidences: Confidences) -> bool:
        return True

    def keep(self, confidences: Confidences) -> list[int]:
        return [len(sure) for sure in confidences]

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        return [[*range(length)] for length in kept]

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        if instead and survival and survival[0] < _LIKELIER_THAN_NOT:
            return 0
        return min(len(survival), self.k_max)

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
