"""The arithmetic of `foredraft bench machine` against numbers worked out by hand."""

from __future__ import annotations

import random

import pytest

from engine.lab.bench.costs import speed_up
from engine.lab.comparison.figures import chance_of


def test_leviathan_by_hand() -> None:
    """a = 0.8, k = 3: 1 + .8 + .64 + .512 tokens, 1.3 steps at c = 0.1."""
    assert speed_up(0.8, 3, 0.1) == pytest.approx(2.952 / 1.3)
    assert speed_up(0.8, 3, 0.1, 1.2) == pytest.approx(2.952 / 1.5)
    assert speed_up(0.5, 0, 0.1) == 1


@pytest.mark.parametrize("acceptance", [0.2, 0.8])
def test_acceptance_is_found_again(acceptance: float) -> None:
    """Bug: accepted/proposed underestimates acceptance: nothing after a rejection is verified."""
    generator = random.Random(0)
    proposed, accepted = [0.0] * 5, [0.0] * 5
    for _ in range(20_000):
        kept = 0
        while kept < 5 and generator.random() < acceptance:
            kept += 1
        for i in range(5):
            proposed[i] += 1
            accepted[i] += i < kept
    assert chance_of(proposed, accepted) == pytest.approx(acceptance, abs=0.01)


def test_nothing_proposed_is_no_acceptance() -> None:
    assert chance_of([], []) == 0
    assert chance_of([0.0, 0.0], [0.0, 0.0]) == 0
    assert chance_of([4.0, 4.0], [4.0, 4.0]) == 1
