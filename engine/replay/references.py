"""What a policy is compared with: every fixed K, and who knows all hits beforehand."""

from __future__ import annotations

from engine.replay.costs import Costs
from engine.replay.streams import Live, Workload


def fixed_k(workload: Workload, costs: Costs, k: int) -> tuple[float, int]:
    """Seconds and tokens of the same K in every round."""
    batch: list[Live] = []
    total, tokens, rounds = 0.0, 0, 0
    while not workload.over(tokens, rounds):
        workload.admit(batch, tokens)
        rows = sequences = len(batch)
        context = late = 0
        for live in batch:
            request, begin = live.request, live.position
            context += request.context + begin
            late += begin - live.scored
            want = live.room(k)
            rows += want
            accepted = min(want, request.runs[begin])
            end = begin + accepted
            live.position = min(end + 1, request.length)
            live.scored = min(end + (accepted < want), live.position) if want else live.scored
            tokens += live.position - begin
        drafting = costs.draft(sequences + late) + (k - 1) * costs.draft(sequences) if k else 0.0
        total += drafting + costs.target(rows, sequences, context) + costs.host(rows)
        rounds += 1
        batch = [live for live in batch if not live.ended]
    return total, tokens


def clairvoyant(fresh: Workload, costs: Costs, k_max: int, price: float) -> tuple[float, int]:
    """Seconds and tokens of one that knows every hit: it drafts and verifies only what will be
    kept, in each round as deep as pays at `price`, tokens per second (Dinkelbach's parameter of a
    ratio: at the best price it is the ratio reached)."""
    batch: list[Live] = []
    total, tokens, rounds = 0.0, 0, 0
    while not fresh.over(tokens, rounds):
        fresh.admit(batch, tokens)
        depth, seconds = _best_depth(batch, costs, k_max, price)
        total += seconds
        for live in batch:
            begin = live.position
            end = begin + min(depth, live.request.runs[begin]) + 1
            live.position = min(end, live.request.length)
            tokens += live.position - begin
        rounds += 1
        batch = [live for live in batch if not live.ended]
    return total, tokens


def _best_depth(batch: list[Live], costs: Costs, k_max: int, price: float) -> tuple[int, float]:
    """The depth with the most tokens less priced seconds, and its seconds."""
    sequences = len(batch)
    context = sum(live.request.context + live.position for live in batch)
    left = [
        min(live.request.runs[live.position], live.request.length - live.position - 1, k_max)
        for live in batch
    ]
    rows, drafting = sequences, 0.0
    best, chosen = float("-inf"), (0, 0.0)
    for depth in range(k_max + 1):
        if depth:
            deep = sum(n >= depth for n in left)
            if not deep:
                break
            rows += deep
            drafting += costs.draft(deep)
        seconds = drafting + costs.target(rows, sequences, context) + costs.host(rows)
        value = rows - price * seconds
        if value > best:
            best, chosen = value, (depth, seconds)
    return chosen
