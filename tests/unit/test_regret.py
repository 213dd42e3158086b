"""Regret: what the choices of K cost compared with the best constant K."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from engine.messages import Estimates
from server.observe.speculation import Regret

EASY, HARD = [100.0, 200.0], [100.0, 50.0]  # tokens/s at K = 0 and 1


def regret_of(steps: list[tuple[int, list[float]]]) -> float:
    regret = Regret()
    for k, rates in steps:
        regret.observe(Estimates(k=k, rates=rates), 10)
    return regret.value


def test_the_best_single_k_has_none() -> None:
    assert regret_of([(1, EASY)] * 100) == pytest.approx(0.0)


def test_a_wrong_k_costs_its_extra_time() -> None:
    """Law: taking twice the time is a regret of 1."""
    assert regret_of([(0, EASY)] * 100) == pytest.approx(1.0)


def test_changing_at_the_right_time_beats_every_single_k() -> None:
    """Law: regret compares with the best constant K, so it may fall below 0."""
    steps = list(islice(cycle([(1, EASY), (0, HARD)]), 1000))
    assert regret_of(steps) == pytest.approx(0.75 - 1, abs=0.01)  # 1.5 units, not 2 as at K = 0


def test_old_steps_fade() -> None:
    """Law: after a few memory lengths, earlier mistakes are forgotten."""
    assert regret_of([(0, EASY)] * 100 + [(1, EASY)] * 4000) < 0.001


@pytest.mark.parametrize("rates", [[], [0.0], [0.0, 5.0], [3.0]])
def test_without_estimates_there_is_no_regret(rates: list[float]) -> None:
    """Law: nothing divides by zero, and a K without an estimate is no evidence."""
    assert regret_of([(1, rates)] * 3) == 0.0


def test_another_engine_starts_anew() -> None:
    assert regret_of([(0, EASY)] * 100 + [(2, [1.0, 2.0, 4.0])]) == pytest.approx(0.0)
