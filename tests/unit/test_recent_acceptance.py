"""RecentAcceptance: shares by position, which stay right when K varies."""

from __future__ import annotations

import pytest

from server.observe.speculation import RecentAcceptance


def test_each_position_has_its_own_denominator() -> None:
    """Law: a short proposal is no evidence against the positions that it never reached."""
    kept = RecentAcceptance()
    for _ in range(10):
        kept.observe([4, 4, 4], [4, 2, 1])
        kept.observe([4], [0])
        kept.observe([], [])
    assert kept.shares == pytest.approx([0.5, 0.5, 0.25], abs=0.01)


def test_what_is_long_ago_is_forgotten() -> None:
    """Law: positions that nobody tries any more have no share."""
    kept = RecentAcceptance(10)
    kept.observe([8, 8], [8, 8])
    for _ in range(100):
        kept.observe([8], [2])
    assert kept.shares == pytest.approx([0.25], abs=0.01)


def test_nothing_yet() -> None:
    assert RecentAcceptance().shares == []


def test_weights_that_grow_are_scaled_down() -> None:
    """Law: however long a server runs, shares stay those of the last steps."""
    kept = RecentAcceptance(2)
    for _ in range(2000):  # weights double, which alone would overflow
        kept.observe([8, 4], [2, 1])
    assert kept.shares == pytest.approx([0.25, 0.25])
