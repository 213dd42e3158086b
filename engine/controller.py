"""Controller: which K pays. What every controller must offer, and the one that obeys (FixedK).

AdaptiveK, the one that decides, is `adaptive`'s. No clock and no randomness in here: seconds are
passed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.estimates import Outcome, Points
from engine.messages import Estimates, Reason

NO_BATCHES: Mapping[int, Points] = {}
NEVER = 2.0  # no chance is as large
Confidences = Sequence[Sequence[float]]  # by sequence, of its guesses in order

_LIKELY = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """What the next step faces: how many sequences will sample in it."""

    num_sequences: int


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What one step did and took. `rows` are the target's, `tokens` were generated; `context`:
    tokens of all sequences before these rows, if that is known. The three times
    are disjoint parts of the step; its costs are learnt only if it is `pure_decode` (no prompt
    rows).

    Of the main proposer alone: `k`, the largest asked of it; `outcomes` of each sequence left to
    it; `confidences`, for each of these those of the tried guesses (empty: it has none);
    `agreements`, (confidence, right) of guesses that it would have made at positions in a row,
    found out in hindsight; `num_drafting`: sequences that it drafted for; None: all of them; 0: the
    time of drafting says nothing (some had to catch up)."""

    num_sequences: int
    rows: int
    k: int
    tokens: int
    outcomes: Sequence[Outcome]
    draft_seconds: float
    target_seconds: float
    host_seconds: float
    pure_decode: bool
    num_drafting: int | None = None
    confidences: Confidences = ()
    agreements: Sequence[Sequence[tuple[float, bool]]] = ()
    context: int | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.draft_seconds + self.target_seconds + self.host_seconds


class KController(Protocol):
    """Chooses one K for the batch before each step, learns after it. `profile` hands over start-up
    measurements: target seconds by rows, seconds of one draft step by sequences, host seconds; for
    some numbers of sequences the target's by rows; and the numbers of rows that forwards are
    padded to, rising (none: they are not); and seconds more, of the target and of a draft step,
    for each token of context (the others have profile_sizes.CONTEXT of each sequence).
    `reason`: why the last choice; see messages.Estimates. `listens`: whether `update` is to be told
    of the step that follows it (at K = 0, once settled, it would cost more than it tells);
    `looks_back`: of its `agreements`, too.
    `max_speculating`: for how many sequences
    the last choice is meant; None means all of them. `resume`: it is obeyed again after a spell in
    which others chose.

    Where each draft step is a forward of its own, `goes_on` is asked between them, with the
    confidences so far of those who might have more. `keep`, last in a round: how many of each
    drafted sequence's guesses, from its first, are worth a row of the target. `worth` prices
    guesses that cost nothing to make, for one sequence of the same step: given their chances to be
    kept (each with all before it), how many pay; 0 also where the main proposer, if it may be asked
    `instead`, is the better choice. None does where the first is less likely than `least`.

    `plain_seconds`: of a step in which so many sequences, with so many tokens of context among
    them, get a token each without a guess, at the present costs; 0 where these are not known."""

    name: str
    k_max: int

    @property
    def reason(self) -> Reason: ...

    @property
    def listens(self) -> bool: ...

    @property
    def looks_back(self) -> bool: ...

    @property
    def max_speculating(self) -> int | None: ...

    def profile(
        self,
        target_points: Points,
        draft_points: Points,
        host_seconds: float,
        batches: Mapping[int, Points] = NO_BATCHES,
        padded: Sequence[int] = (),
        token_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None: ...

    def choose(self, load: Load) -> int: ...

    def resume(self) -> None: ...

    def goes_on(self, confidences: Confidences) -> bool: ...

    def keep(self, confidences: Confidences) -> list[int]: ...

    def worth(self, survival: Sequence[float], *, instead: bool) -> int: ...

    def least(self, *, instead: bool) -> float: ...

    def plain_seconds(self, sequences: int, context: int) -> float: ...

    def update(self, observation: StepObservation) -> None: ...

    def estimates(self) -> Estimates: ...


class FixedK:
    """The same K in every round; 0 is plain decoding. The baseline of every benchmark. It knows no
    costs: free guesses go before the main proposer's where the first is likelier right than not."""

    name = "fixed"
    listens = looks_back = False
    max_speculating: int | None = None

    def __init__(self, k: int) -> None:
        self.k_max = k
        self.reason: Reason = "fixed" if k else "off"

    def profile(
        self,
        target_points: Points,
        draft_points: Points,
        host_seconds: float,
        batches: Mapping[int, Points] = NO_BATCHES,
        padded: Sequence[int] = (),
        token_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        return None

    def choose(self, load: Load) -> int:
        return self.k_max

    def resume(self) -> None:
        return None

    def goes_on(self, confidences: Confidences) -> bool:
        return True

    def keep(self, confidences: Confidences) -> list[int]:
        return [len(sure) for sure in confidences]

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        if survival and survival[0] < self.least(instead=instead):
            return 0
        return min(len(survival), self.k_max)

    def least(self, *, instead: bool) -> float:
        if not self.k_max:
            return NEVER
        return _LIKELY if instead else 0.0

    def plain_seconds(self, sequences: int, context: int) -> float:
        return 0.0

    def update(self, observation: StepObservation) -> None:
        return None

    def estimates(self) -> Estimates:
        return Estimates(k=self.k_max, reason=self.reason)
