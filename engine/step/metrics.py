"""Sums over one step, from what was planned and what was kept."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.control.controller import StepObservation
from engine.messages import StepMetrics, StepSeconds
from engine.scheduling.step_plan import StepPlan
from engine.speculation.allowance import MainOutcomes
from engine.speculation.proposal import GRAMMAR, Proposal
from engine.speculation.proposer import Agreement
from engine.step.acceptance import Sampled


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
    most = max([s.proposal.num_candidates for s in sampled], default=0)
    proposed_at, accepted_at, k_counts = [0] * most, [0] * most, [0] * (most + 1)
    by_proposer: dict[str, tuple[int, int]] = {}
    for item in sampled:
        proposal, count = item.proposal, item.proposal.num_candidates
        k_counts[count] += 1
        if not count:
            continue
        accepted = item.num_accepted
        _count(by_proposer, item, accepted)
        for d in range(count) if proposal.is_chain else _places(proposal, count):
            proposed_at[d] += 1
        for d in range(accepted):
            accepted_at[d] += 1
    gauges.num_proposed = sum(proposed_at)
    gauges.num_accepted = sum(accepted_at)
    gauges.by_proposer = by_proposer
    gauges.proposed_at, gauges.accepted_at = proposed_at, accepted_at
    gauges.k_counts = k_counts


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
    overhead: float,
) -> StepObservation:
    """The step as the controller learns from it. `overhead`: seconds, see step_clock."""
    rows = tokens = context = 0
    for chunk in plan.chunks:
        rows += chunk.length
        context += chunk.start
    prompt_rows = rows - len(plan.chunks)
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
        host_seconds=overhead + seconds.schedule + seconds.accept + seconds.commit + seconds.emit,
        prompt_rows=prompt_rows,
        num_drafting=main.num_drafting,
        context=context,
    )
