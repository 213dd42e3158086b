"""What a pair's costs and its acceptance promise, on paper.

Leviathan et al. (arXiv:2211.17192): with acceptance a at each position and a draft step of c
target steps, k guesses give (1 - a^(k+1)) / (1 - a) tokens a round, and the round takes k c + 1
target steps, as if verifying k + 1 rows took as long as one. `with_verification` charges what it
does take.
"""

from __future__ import annotations

from collections.abc import Sequence


def tokens_per_round(acceptance: float, k: int) -> float:
    """Expected tokens of a round of k guesses, the target's own included."""
    return sum(acceptance**i for i in range(k + 1))


def leviathan(acceptance: float, k: int, draft_cost: float) -> float:
    """Speed-up over plain decoding. `draft_cost`: a draft step, in target steps of one row."""
    return tokens_per_round(acceptance, k) / (k * draft_cost + 1)


def with_verification(acceptance: float, k: int, draft_cost: float, verification: float) -> float:
    """The same; `verification`: a target step of k + 1 rows, in target steps of one row."""
    return tokens_per_round(acceptance, k) / (k * draft_cost + verification)


def acceptance_of(proposed_at: Sequence[float], accepted_at: Sequence[float]) -> float:
    """The chance that a guess is kept, given that those before it were: kept guesses over kept ones
    and first rejections (the estimate of largest likelihood). `proposed_at[i]`, `accepted_at[i]`:
    guesses at the i-th position of a proposal; exact where all proposals are of one length. 0 where
    nothing was proposed."""
    kept = sum(accepted_at)
    full = 0.0  # proposals kept whole, by their last position
    for i, count in enumerate(proposed_at):
        longer = proposed_at[i + 1] if i + 1 < len(proposed_at) else 0.0
        if count > longer and i < len(accepted_at):
            full += min(accepted_at[i], count - longer)
    rejections = (proposed_at[0] if proposed_at else 0.0) - full
    return kept / (kept + rejections) if kept + rejections > 0 else 0.0
