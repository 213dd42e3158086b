"""The closed forms of speculation: Leviathan's formula, best K, break-even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lab.plan.roofline import best, break_even, expected_tokens

# Best K <= 32 and its speed-up, (1 - a^(K+1)) / (1 - a) / (1 + K (c + v)), by acceptance a.
# Columns: c of .02, .05, .1, .2 with v = 0, then c = .1 with v = .05.
TABLE = {
    0.5: [(4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (2, 1.35)],
    0.7: [(8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (3, 1.75)],
    0.8: [(11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (5, 2.11)],
    0.9: [(19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (8, 2.78)],
    0.95: [(31, 9.95), (21, 6.60), (15, 4.48), (10, 2.87), (12, 3.48)],
}
COSTS = [(0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.2, 0.0), (0.1, 0.05)]


def speed_up(acceptance: float, k: int, cost: float) -> float:
    """Return the speed-up; `cost` is what each guess adds to a round."""
    return expected_tokens(acceptance, k) / (1 + k * cost)


@pytest.mark.parametrize("column", range(len(COSTS)))
@pytest.mark.parametrize("acceptance", TABLE)
def test_the_table_of_best_ks(acceptance: float, column: int) -> None:
    """Law: arXiv:2211.17192, theorem 3.8, maximised over K."""
    draft, row = COSTS[column]
    k, speed = best([speed_up(acceptance, k, draft + row) for k in range(33)])
    assert k == TABLE[acceptance][column][0]
    assert speed == pytest.approx(TABLE[acceptance][column][1], abs=0.005)


def test_limits() -> None:
    """Law: at acceptance 1 a round yields K + 1 tokens, at 0 one; K = 0 is plain decoding."""
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    assert best([speed_up(0.0, k, 0.1) for k in range(9)]) == (0, 1.0)


def test_the_smallest_of_equal_ks() -> None:
    """Law: of equally fast K, the smallest wins."""
    assert best([1.0] * 9) == (0, 1.0)


def test_the_second_hump_is_found() -> None:
    """Law: every K is tried; hill climbing would stop at 1."""
    assert best([1.0, 1.2, 1.1, 1.0, 1.5]) == (4, 1.5)


@given(st.integers(1, 16), st.floats(0.5, 30))
def test_break_even(k: int, cost: float) -> None:
    """Law: at the break-even acceptance, K is as fast as plain decoding; there is none exactly if K
    + 1 tokens cannot pay for the round."""
    least = break_even(k, cost)
    assert (least is None) == (cost >= k + 1)
    if least is not None and cost > 1:
        assert expected_tokens(least, k) == pytest.approx(cost)
    elif least is not None:
        assert least == pytest.approx(0)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 16))
def test_more_acceptance_is_never_slower(one: float, other: float, k: int) -> None:
    """Law: speed-up grows with acceptance."""
    low, high = sorted((one, other))
    assert speed_up(low, k, 0.1) <= speed_up(high, k, 0.1)
