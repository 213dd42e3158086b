"""What a round's proposals are worth, guess by guess."""

from __future__ import annotations

import random
from math import exp

import numpy as np
import pytest

from engine.control.chances import FEW, Chances

DEPTHS = 5
BASES = [-0.5, 0.0, 0.3, 0.1, -0.2]


def trusted() -> Chances:
    chances = Chances(DEPTHS)
    chances.trust(BASES, 0.8)
    return chances


@pytest.mark.parametrize("proposals", [1, 3, FEW + 4])
def test_what_grew_by_a_guess_at_a_time_is_what_was_asked_at_once(proposals: int) -> None:
    """Law: keeping what was found saves time and changes nothing, where some proposals end early
    too."""
    rng = random.Random(proposals)
    lengths = [rng.randint(1, DEPTHS) for _ in range(proposals)]
    sure = [[rng.gauss(1.5, 1.5) for _ in range(n)] for n in lengths]
    grown, at_once = trusted(), trusted()
    for depth in range(1, DEPTHS + 1):
        live = [each[:depth] for each in sure if len(each) >= depth]
        if live:
            grown.lists(live)
    assert grown.lists(sure) == at_once.lists(sure)
    for row, found in zip(sure, at_once.lists(sure), strict=True):
        odds = [base + 0.8 * c for base, c in zip(BASES, row, strict=False)]
        assert found == pytest.approx(np.cumprod([1 / (1 + exp(-z)) for z in odds]).tolist())


def test_another_round_starts_anew() -> None:
    """Bug this guards against: the last round's proposals stand for as many others."""
    chances = trusted()
    first = chances.lists([[3.0], [0.1]])[1][0]
    chances.restart()
    assert chances.lists([[0.1], [3.0]])[0][0] == first
