"""Sums over one step, from what was planned and what was kept. And a stopwatch."""

from __future__ import annotations

from collections.abc import Callable

from engine.acceptance import Sampled
from engine.messages import StepMetrics, StepSeconds
from engine.step_plan import StepPlan


def measure(
    plan: StepPlan, sampled: list[Sampled], seconds: StepSeconds, gauges: StepMetrics
) -> StepMetrics:
    """`gauges` with this step's sums filled in. Every sequence that sampled is counted at the K
    that was planned for it; depths count what was verified, whatever K was."""
    depth = max((len(s.proposal) for s in sampled), default=0)
    proposed_at, accepted_at = [0] * depth, [0] * depth
    k_counts = [0] * (1 + max((s.chunk.k for s in sampled), default=0))
    by_proposer: dict[str, tuple[int, int]] = {}
    for item in sampled:
        k_counts[item.chunk.k] += 1
        if item.proposal.num_candidates:
            proposed, accepted = by_proposer.get(item.proposal.source, (0, 0))
            pair = proposed + item.proposal.num_candidates, accepted + item.num_accepted
            by_proposer[item.proposal.source] = pair
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


class Stopwatch:
    """Seconds since the last call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()

    def __call__(self) -> float:
        now = self._clock()
        elapsed, self._last = now - self._last, now
        return elapsed
