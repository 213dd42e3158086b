"""Sums over one step, from what was planned and what was kept. And a stopwatch."""

from __future__ import annotations

from collections.abc import Callable

from engine.acceptance import Sampled
from engine.messages import StepMetrics, StepSeconds
from engine.speculation.proposal import GRAMMAR
from engine.step_plan import StepPlan


def measure(
    plan: StepPlan, sampled: list[Sampled], seconds: StepSeconds, gauges: StepMetrics
) -> StepMetrics:
    """`gauges` with this step's sums filled in. Every sequence that sampled is counted at the
    number of its guesses that were verified: what was planned is only the most there could be."""
    depth = max((len(s.proposal) for s in sampled), default=0)
    proposed_at, accepted_at = [0] * depth, [0] * depth
    k_counts = [0] * (1 + max((s.proposal.num_candidates for s in sampled), default=0))
    by_proposer: dict[str, tuple[int, int]] = {}
    for item in sampled:
        k_counts[item.proposal.num_candidates] += 1
        _count(by_proposer, item)
        for d in item.proposal.depths()[: item.proposal.num_candidates]:
            proposed_at[d - 1] += 1
        for d in range(item.num_accepted):
            accepted_at[d] += 1
    gauges.seconds = seconds
    gauges.num_prompt_tokens = sum(
        max(0, min(c.end, c.seq.num_prompt) - c.start) for c in plan.chunks
    )
    gauges.num_generated_tokens = sum(len(s.tokens) for s in sampled)
    gauges.num_sampling = len(sampled)
    gauges.num_proposed = sum(proposed_at)
    gauges.num_accepted = sum(accepted_at)
    gauges.by_proposer = by_proposer
    gauges.proposed_at, gauges.accepted_at, gauges.k_counts = proposed_at, accepted_at, k_counts
    gauges.queried_tokens = sum(seq.num_prompt for seq in plan.admitted)
    gauges.cached_tokens = sum(seq.cached_tokens or 0 for seq in plan.admitted)
    gauges.preemptions = len(plan.preempted)
    return gauges


def _count(by_proposer: dict[str, tuple[int, int]], item: Sampled) -> None:
    """Add the guesses of one sequence, proposed and accepted, to those who made them."""
    proposal = item.proposal
    if not proposal.num_candidates:
        return
    own = proposal.num_candidates - len(proposal.forced)
    forced = sum(node in proposal.forced for node in item.path[: item.num_accepted])
    pairs = {proposal.source: (own, item.num_accepted - forced)}
    if proposal.forced:
        pairs[GRAMMAR] = len(proposal.forced), forced
    for name, (more, kept) in pairs.items():
        proposed, accepted = by_proposer.get(name, (0, 0))
        by_proposer[name] = proposed + more, accepted + kept


class Stopwatch:
    """Seconds since the last call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()

    def __call__(self) -> float:
        now = self._clock()
        elapsed, self._last = now - self._last, now
        return elapsed
