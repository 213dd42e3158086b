"""Sums over one step, from what was planned and what was kept. And a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.acceptance import Sampled
from engine.allowance import MainOutcomes
from engine.controller import StepObservation
from engine.messages import StepMetrics, StepSeconds
from engine.speculation.proposal import GRAMMAR, Proposal
from engine.speculation.proposer import Agreement
from engine.step_plan import StepPlan


def settle(seconds: StepSeconds) -> None:
    """What a device still computed of the forwards, while the host had gone on to accept, is
    counted as drafting and verification. On a CPU nothing moves."""
    late = min(max(seconds.propose_forward - seconds.propose, 0.0), seconds.accept)
    seconds.propose += late
    seconds.accept -= late
    late = min(max(seconds.verify_forward - seconds.verify, 0.0), seconds.accept)
    seconds.verify += late
    seconds.accept -= late


def measure(
    plan: StepPlan,
    sampled: list[Sampled],
    seconds: StepSeconds,
    gauges: StepMetrics,
    plain_seconds: Callable[[int, int], float],
) -> StepMetrics:
    """`gauges` with this step's sums filled in. `plain_seconds`: see KController."""
    prompt = rows = context = 0
    for chunk in plan.chunks:
        start, length = chunk.start, chunk.length
        rows += length
        context += start
        if start < chunk.seq.num_prompt:
            prompt += min(length, chunk.seq.num_prompt - start)
    gauges.seconds = seconds
    gauges.num_prompt_tokens = prompt
    gauges.num_generated_tokens = tokens = sum([len(s.tokens) for s in sampled])
    gauges.num_sampling = size = len(sampled)
    if rows == size:  # one of each: no prompts
        gauges.plain_seconds = tokens / size * plain_seconds(size, context)
    _count_guesses(gauges, sampled)
    for seq in plan.admitted:
        gauges.queried_tokens += seq.num_prompt
        gauges.cached_tokens += seq.cached_tokens or 0
    gauges.preemptions = len(plan.preempted)
    return gauges


def _count_guesses(gauges: StepMetrics, sampled: list[Sampled]) -> None:
    """Every sequence that sampled is counted at the number of its guesses that were verified: what
    was planned is only the most there could be."""
    depth = max([len(s.proposal) for s in sampled], default=0)
    counts = [s.proposal.num_candidates for s in sampled]
    proposed_at, accepted_at = [0] * depth, [0] * depth
    by_proposer: dict[str, tuple[int, int]] = {}
    for item, count in zip(sampled, counts, strict=True):
        if not count:
            continue
        proposal, accepted = item.proposal, item.num_accepted
        _count(by_proposer, item, accepted)
        for d in range(count) if proposal.is_chain else _places(proposal, count):
            proposed_at[d] += 1
        for d in range(accepted):
            accepted_at[d] += 1
    gauges.num_proposed = sum(proposed_at)
    gauges.num_accepted = sum(accepted_at)
    gauges.by_proposer = by_proposer
    gauges.proposed_at, gauges.accepted_at = proposed_at, accepted_at
    gauges.k_counts = [counts.count(k) for k in range(1 + max(counts, default=0))]


def _places(proposal: Proposal, count: int) -> list[int]:
    """How many stand above each of its first nodes."""
    return [depth - 1 for depth in proposal.depths()[:count]]


def _count(by_proposer: dict[str, tuple[int, int]], item: Sampled, accepted: int) -> None:
    """Add the guesses of one sequence, proposed and accepted, to those who made them."""
    proposal, own = item.proposal, item.proposal.num_candidates
    if proposal.forced:
        forced = sum(node in proposal.forced for node in item.path[:accepted])
        _add(by_proposer, GRAMMAR, len(proposal.forced), forced)
        own, accepted = own - len(proposal.forced), accepted - forced
    _add(by_proposer, proposal.source, own, accepted)


def _add(by_proposer: dict[str, tuple[int, int]], name: str, proposed: int, accepted: int) -> None:
    before, kept = by_proposer.get(name, (0, 0))
    by_proposer[name] = before + proposed, kept + accepted


def observation(
    plan: StepPlan,
    sampled: list[Sampled],
    seconds: StepSeconds,
    main: MainOutcomes,
    agreed: Seq[Agreement],
    around: float,
) -> StepObservation:
    """The step as the controller learns from it. `around`: see Around."""
    rows = tokens = context = 0
    pure = True
    for chunk in plan.chunks:
        rows += chunk.length
        context += chunk.start
        pure = pure and chunk.length == 1
    for item in sampled:
        rows += len(item.proposal.tokens)
        tokens += len(item.tokens)
    return StepObservation(
        num_sequences=len(plan.chunks),
        rows=rows,
        k=main.k,
        tokens=tokens,
        outcomes=main.outcomes,
        confidences=main.confidences,
        agreements=[list(zip(found.confidences, found.hits, strict=True)) for found in agreed],
        draft_seconds=seconds.propose,
        target_seconds=seconds.verify,
        host_seconds=around + seconds.schedule + seconds.accept + seconds.commit + seconds.emit,
        pure_decode=pure,
        num_drafting=main.num_drafting,
        context=context,
    )


class Stopwatch:
    """Seconds since the last call. `last`: the clock at it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = clock()

    def __call__(self) -> float:
        now = self._clock()
        elapsed, self.last = now - self.last, now
        return elapsed


class Around:
    """Seconds of the host that no verb tells and that are part of what a step costs: between steps
    that follow each other at once, and of what comes after the verbs. The controller's own are
    counted as they are once it has settled: at K = 0 it is hardly asked then. A baseline, which it
    watches, would look dearer than K = 0 is, and a trial, at which it chooses anew, than K > 0."""

    def __init__(self) -> None:
        self._ended: float | None = None  # the step before, if this one followed at once
        self._between = self._choosing = self._past = 0.0
        # By batch size (of a power of two): what comes after the verbs, with guesses and without;
        # and what choosing takes where guesses are usual.
        self._after: dict[tuple[bool, int], float] = {}
        self._chosen: dict[int, float] = {}

    def begin(self, lap: Stopwatch) -> float:
        """Seconds since the verbs of the step before, if this one follows it at once."""
        if self._ended is None:
            self._between = 0.0
            return 0.0
        self._between = lap.last - self._ended
        self._ended = None
        return self._past + self._between

    def chose(self, seconds: float) -> float:
        """The same seconds, which are within a verb."""
        self._choosing = seconds
        return seconds

    def seconds(self, sequences: int, *, speculates: bool) -> float:
        """Of this step, to be added to those of its verbs."""
        size = sequences.bit_length()
        more = self._between + self._after.get((speculates, size), 0.0) - self._choosing
        return more + self._chosen.get(size, 0.0) if speculates else more

    def end(
        self,
        lap: Stopwatch,
        sequences: int,
        *,
        speculates: bool,
        settled: bool,
        heard: bool,
        goes_on: bool,
    ) -> None:
        """After everything; `settled`: the step was a usual one of its kind; `heard`: the
        controller was told of it, as it is of few steps with guesses once it has settled;
        `goes_on`: there is more work."""
        self._past = after = lap()
        if settled:
            size = sequences.bit_length()
            known = self._after.get((speculates, size))
            if known is None:
                known = self._after.get((False, size), after)
            share = 1 / 64 if heard and speculates else 1 / 16
            self._after[speculates, size] = known + (after - known) * share
            if speculates:
                before = self._chosen.get(size, 0.0)
                self._chosen[size] = before + (self._choosing - before) * share
        if goes_on:
            self._ended = lap.last
