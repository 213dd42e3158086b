"""Controller: which K pays. FixedK obeys; AdaptiveK maximises expected tokens per second.

AdaptiveK multiplies two estimates: how many guesses will be accepted (a survival model of the first
mismatch) and what a step of a given size costs (a start-up profile, corrected online). K = 0 is an
ordinary answer; while there, short probes keep the acceptance estimate alive. Goodput as the goal:
TurboSpec, arXiv:2406.14066. No clock and no randomness in here: seconds are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from engine.config import SpeculationConfig
from engine.estimates import AcceptanceEstimate, CostCurve, HostCost, Points
from engine.messages import Estimates, Reason

_HYSTERESIS = 1.02
_PROBE_K = 2
_PROBE_SEQUENCES = 4  # of the batch, where a drafter must first catch up with what it missed
_PROBE_FIRST, _PROBE_LAST = 32, 256  # rounds between probes while K is 0
_BASELINE_FIRST, _BASELINE_LATER = (3, 6), 128  # rounds at K > 0 after which one is played at 0
_NEIGHBOUR = 32  # and after which one is played at K + 1 or K - 1, in turn
_BURST_TRIALS = 24.0  # a promising probe is repeated at once until it has this many trials
_PROMISING = 0.5  # accepted of proposed
_DOUBT = 12.0  # trials that the past may weigh against a probe


@dataclass(frozen=True, slots=True)
class Load:
    """What the next step faces: sequences that will sample in it, the sum of their lengths, the
    queue behind them."""

    num_sequences: int
    context_tokens: int = 0
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What one step did and took. `rows` are the target's. Of the main proposer alone: `k`, the
    largest asked of it, and `outcomes`, (proposed, accepted) of each sequence left to it. The three
    times are disjoint parts of the step; its costs are learnt only if it is `pure_decode` (no
    prompt rows). `num_drafting`: sequences that the main proposer drafted for; None: all of them;
    0: the time of drafting says nothing (some had to catch up)."""

    num_sequences: int
    rows: int
    k: int
    outcomes: Sequence[tuple[int, int]]
    draft_seconds: float
    target_seconds: float
    host_seconds: float
    pure_decode: bool
    num_drafting: int | None = None


class KController(Protocol):
    """Chooses one K for the batch before each step, learns after it. `profile` hands over start-up
    measurements: target seconds by rows, seconds of one draft step by sequences, host seconds.
    `reason`: why the last choice; see messages.Estimates.
    `max_speculating`: for how many sequences the last choice is meant; None means all of them.
    `worth` prices guesses that cost nothing to make, for one sequence of the same step: given their
    chances to be kept (each with all before it), how many pay; 0 also where the main proposer, if
    it may be asked `instead`, is the better choice."""

    name: str
    k_max: int

    @property
    def reason(self) -> Reason: ...

    @property
    def max_speculating(self) -> int | None: ...

    def profile(self, target_points: Points, draft_points: Points, host_seconds: float) -> None: ...

    def choose(self, load: Load) -> int: ...

    def worth(self, survival: Sequence[float], *, instead: bool) -> int: ...

    def update(self, observation: StepObservation) -> None: ...

    def estimates(self) -> Estimates: ...


class FixedK:
    """The same K in every round; 0 is plain decoding. The baseline of every benchmark."""

    name = "fixed"
    max_speculating: int | None = None

    def __init__(self, k: int) -> None:
        self.k_max = k
        self.reason: Reason = "fixed" if k else "off"

    def profile(self, target_points: Points, draft_points: Points, host_seconds: float) -> None:
        return None

    def choose(self, load: Load) -> int:
        return self.k_max

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        return min(len(survival), self.k_max)

    def update(self, observation: StepObservation) -> None:
        return None

    def estimates(self) -> Estimates:
        return Estimates(k=self.k_max, reason=self.reason)


class _Probe:
    """When to look again while K is 0: after 32 rounds, then ever more rarely up to 256; at once,
    and for some trials, while what it sees is promising."""

    def __init__(self) -> None:
        self._interval = _PROBE_FIRST
        self._rounds = 0
        self._trials = 0.0
        self.active = False

    def restart(self) -> None:
        """The world changed (another batch size): look soon."""
        self._interval = _PROBE_FIRST

    def due(self) -> bool:
        """One more round at 0; whether this one should probe instead."""
        self._rounds += 1
        self.active = self._rounds >= self._interval
        return self.active

    def result(self, outcomes: Sequence[tuple[int, int]]) -> None:
        """What the probe saw decides when to look next."""
        self.active = False
        proposed = sum(pair[0] for pair in outcomes)
        accepted = sum(pair[1] for pair in outcomes)
        self._trials += proposed
        self._rounds = 0
        if proposed and accepted >= _PROMISING * proposed and self._trials < _BURST_TRIALS:
            self._rounds = self._interval
            return
        self._trials = 0.0
        self._interval = min(2 * self._interval, _PROBE_LAST)


class AdaptiveK:
    """K in 0..k_max with the most expected tokens per second, for the batch as a whole.

    It leaves the present K only for a gain of 2 %, except when the batch size changes by a power
    of two. Costs are learnt from pure decode steps, acceptance from all. One round in 32 tries a
    neighbour of K, and one in 128 plain decoding, at this batch size: without them no error of the
    profile could be noticed that hides the better choice.
    """

    name = "adaptive"

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self.reason: Reason = "off"
        self._acceptance = AcceptanceEstimate(k_max)
        self._target = CostCurve(((1, 1e-3), (65, 2e-3)))
        self._draft = CostCurve()
        self._host = HostCost()
        self._probe = _Probe()
        self._probe_sequences: int | None = None
        self._k = 0
        self._chosen = (1, 0)  # sequences and K of the last choice
        self._each = [(1.0, 1.0)]  # tokens and rows per sequence by K, at the last choice
        self._size = -1  # power of two of the batch at the last choice
        self._rates = [0.0]  # tokens per second by K, at the last choice
        self._speculated: dict[int, int] = {}  # rounds at K > 0, by that power of two
        self._drafted = True  # whether the last round proposed: the next has no backlog

    def profile(self, target_points: Points, draft_points: Points, host_seconds: float) -> None:
        """Start-up costs. Without draft points (nothing to forward) a draft step is cheap until it
        is seen to be otherwise."""
        if target_points:
            self._target.set_profile(target_points)
        if draft_points:
            self._draft.set_profile(draft_points)
            self._probe_sequences = _PROBE_SEQUENCES
        self._host.start(host_seconds)

    @property
    def max_speculating(self) -> int | None:
        """A probe of a draft model asks a few sequences only: each has to catch up with all that
        it missed while K was 0."""
        return self._probe_sequences if self._probe.active else None

    def choose(self, load: Load) -> int:
        """K for the next step."""
        if not self.k_max:
            return 0
        sequences = max(1, load.num_sequences)
        k = self._choose(sequences)
        self._chosen = sequences, k
        return k

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        """The length with the most expected tokens per second for the batch, whose other sequences
        do as last chosen."""
        sequences, k = self._chosen
        others, size = sequences - 1, sequences.bit_length()
        each_tokens, each_rows = self._each[k]
        tokens, rows = others * each_tokens + 1.0, others * each_rows + 1.0
        drafting = k * self._draft.predict(others, size) if others and k else 0.0
        rate = self._rates[k] if instead else tokens / (self._seconds(rows, size) + drafting)
        best = 0
        for length, chance in enumerate(survival[: self.k_max], start=1):
            tokens += chance
            seconds = self._seconds(rows + length, size) + drafting
            if tokens / seconds > rate:
                best, rate = length, tokens / seconds
        return best

    def _choose(self, sequences: int) -> int:
        self._rates = rates = self._predict(sequences)
        best = max(range(len(rates)), key=rates.__getitem__)
        size = sequences.bit_length()
        if size != self._size:
            self._size = size
            self._k = best
            self._probe.restart()
        elif rates[best] > _HYSTERESIS * rates[self._k]:
            self._k = best
        self.reason = "pays" if self._k else "off"
        if self._k == 0 and self._probe.due():
            self.reason = "probe"
            return min(_PROBE_K, self.k_max)
        return self._check(size) if self._k else 0

    def _check(self, size: int) -> int:
        """The present K, or now and then what it must be compared with."""
        rounds = self._speculated[size] = self._speculated.get(size, 0) + 1
        if rounds in _BASELINE_FIRST or rounds % _BASELINE_LATER == 0:
            self.reason = "baseline"
            return 0
        if rounds % _NEIGHBOUR == 0:
            self.reason = "neighbour"
            return min(self._k + 1, self.k_max) if rounds % (2 * _NEIGHBOUR) else self._k - 1
        return self._k

    def update(self, observation: StepObservation) -> None:
        """Learn from the step that the last choice led to."""
        seen, outcomes = observation, observation.outcomes
        if seen.k and self._probe.active and outcomes:
            if self._probe_sequences:
                outcomes = [pair for pair in outcomes if pair[0]]  # the others were not asked
            self._acceptance.doubt(_DOUBT)
            self._probe.result(outcomes)
        self._acceptance.update(seen.k, outcomes)
        if seen.pure_decode and seen.num_sequences:
            size = seen.num_sequences.bit_length()
            self._target.update(seen.rows, size, seen.target_seconds)
            self._host.update(seen.rows, seen.host_seconds)
            drafting = seen.num_sequences if seen.num_drafting is None else seen.num_drafting
            if seen.k and self._drafted and drafting:
                self._draft.update(drafting, size, seen.draft_seconds / seen.k)
        if seen.outcomes:
            self._drafted = seen.k > 0

    def estimates(self) -> Estimates:
        """As of the last choice."""
        sequences, k = self._chosen
        rates, tokens = self._rates, [each[0] for each in self._each]
        return Estimates(
            k=k,
            reason=self.reason,
            acceptance=1.0 - self._acceptance.rejection,
            survival=[after - before for before, after in pairwise(tokens)],
            rates=list(rates),
            speedup=rates[k] / rates[0] if k < len(rates) and rates[0] else 1.0,
            num_sequences=sequences,
        )

    def _predict(self, sequences: int) -> list[float]:
        """Expected tokens per second for each K."""
        size = sequences.bit_length()
        step = self._draft.predict(sequences, size)
        tokens = rows = 1.0
        rates = [sequences / self._seconds(sequences, size)]
        self._each = [(1.0, 1.0)]
        for k, (offered, survival) in enumerate(self._acceptance.expected(), start=1):
            tokens += survival
            rows += offered
            seconds = self._seconds(sequences * rows, size) + k * step
            rates.append(sequences * tokens / seconds)
            self._each.append((tokens, rows))
        return rates

    def _seconds(self, rows: float, size: int) -> float:
        return self._target.predict(rows, size) + self._host.predict(rows)


def build_controller(config: SpeculationConfig) -> KController:
    """The configured controller; without a proposer there is nothing to choose."""
    if config.k_max == 0 or config.controller.kind == "fixed":
        return FixedK(config.k_max)
    return AdaptiveK(config.k_max)
