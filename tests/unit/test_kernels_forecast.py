"""Laws of the compiled arithmetic of a choice: it says what the same says written with arrays."""

from __future__ import annotations

import numpy as np
import pytest

from engine.control.confidence import LOWEST, SUREST, Array
from engine.control.kernels_forecast import expect, price_rows, sharpen
from tests.support.rising import rising


def proposals(count: int, depths: int, seed: int) -> Array:
    """Confidences; each proposal ends somewhere."""
    rng = np.random.default_rng(seed)
    sample: Array = rng.exponential(3.0, (count, depths))
    for row, length in zip(sample, rng.integers(0, depths + 1, count), strict=True):
        row[length:] = np.nan
    return sample


@pytest.mark.parametrize("seed", range(6))
def test_outcomes_overrule_confidences_on_average(seed: int) -> None:
    """Law: by depth, the mean chance of the guesses that are reached is what outcomes say."""
    sample = proposals(64, 7, seed)
    rng = np.random.default_rng(seed + 100)
    odds, weight = rng.normal(0.5, 1.5, 7), 0.4
    bases = odds - weight * 2.0
    said = ~np.isnan(sample)
    z = np.where(said, bases + weight * np.minimum(sample, SUREST), odds)
    z = np.clip(z, -12.0, 12.0)
    sure = 1.0 / (1.0 + np.exp(-z))
    weights = said * np.cumprod(sure, axis=1) / sure + 1e-12
    mean = (weights * sure).sum(0) / weights.sum(0)
    shift = odds - np.log(mean / (1.0 - mean))
    wanted = 1.0 / (1.0 + np.exp(-np.clip(z + said * shift, -LOWEST, LOWEST)))
    found, shifted = np.empty_like(sample), bases.copy()
    sharpen(sample, odds, shifted, weight, found)
    assert found == pytest.approx(wanted)
    assert shifted == pytest.approx(bases + shift)


def test_who_says_nothing_is_taken_for_the_mean() -> None:
    sample, found = np.full((1, 3), np.nan), np.empty((1, 3))
    odds = np.array([1.0, 0.0, -1.0])
    sharpen(sample, odds, np.zeros(3), 1.0, found)
    assert found[0] == pytest.approx(1.0 / (1.0 + np.exp(-odds)))


@pytest.mark.parametrize("price", [0.0, 400.0])
@pytest.mark.parametrize("sequences", [1, 3, 16])
def test_rates_are_tokens_by_seconds(sequences: int, price: float) -> None:
    """Law: of the ways to cut each number of steps has the best one's rate, tokens and rows."""
    rng = np.random.default_rng(sequences)
    sure, offered = rng.random((40, 5)), np.array([1.0, 0.9, 0.9, 0.5, 0.2])
    seconds = np.cumsum(rng.random(sequences * 6 + 1)) * 1e-3
    spent = np.array([0.0, 1.0, 1.5, 2.0, 2.5, 3.0]) * 1e-4
    bars = np.array([0.0, 0.5, 1.0] if price else [0.0]) * (5e-4 * price)
    alive = np.cumprod(sure, axis=1)
    worth = alive > bars[:, None, None]
    each = np.ones((2, len(bars), 6))
    each[0, :, 1:] += ((alive * worth).sum(1) * offered / 40).cumsum(1)
    each[1, :, 1:] += (worth.sum(1) * offered / 40).cumsum(1)
    rates = np.interp(sequences * each[1], np.arange(len(seconds)), seconds) + spent
    rates = sequences * each[0] / rates
    best, every = rates.argmax(0), np.arange(6)
    found = np.empty((5, 6))
    expect(sure, offered, bars, seconds, spent, sequences, found)
    assert found[0] == pytest.approx(rates[best, every])
    assert found[1] == pytest.approx(rates.max(0) / rates[0] - 1.0)
    assert found[2:4] == pytest.approx(each[:, best, every])
    assert found[4, 1:] == pytest.approx(np.diff(each[0, 0]))


def test_sizes_that_are_not_known_are_hoped_to_be_cheaper() -> None:
    """Law: by half a deviation of what is known of them; no more than that, and never the host."""
    base, places = np.linspace(1e-3, 3e-3, 12), np.arange(12.0)
    known = np.array([[2.0, 0.5, 0.0], [6.0, -0.2, 0.04]])
    host = np.array([1e-4, 1e-5, 5e-5])
    found, hoped = np.empty(12), np.empty(12)
    price_rows(base, places, known, 1.5, 0.0, 0.5, 0.09, host, 2, found, hoped)
    factors = np.exp(np.interp(places, known[:, 0], known[:, 1]))
    doubts = np.full(12, 0.09)
    doubts[2], doubts[6] = 0.0, 0.04
    around = np.where(places <= 2, 5e-5, 1e-4 + 1e-5 * places)
    target = 1.5 * base * factors
    trust = 1.0 / np.maximum(doubts, 1e-9)
    assert found == pytest.approx(rising(target + around, trust))
    cheaper = target * np.exp(-0.5 * np.sqrt(doubts))
    assert hoped == pytest.approx(rising(cheaper + around, trust))


def test_one_dear_size_does_not_make_all_larger_ones_dear() -> None:
    """Bug: more rows were taken to cost at least what fewer did, so a size that only probes see,
    each behind a drafter that catches up, made all up to five rows of a sequence twice as dear:
    sixteen streams stayed at K = 0, at 0.43 of what K = 6 makes. What many rounds have shown of a
    larger size outweighs it."""
    base, places = np.linspace(4e-3, 6e-3, 9), np.arange(9.0)
    known = np.array([[0.0, 0.0, 1e-3], [2.0, 0.5, 8e-3], [4.0, 0.0, 1e-3], [8.0, 0.0, 1e-3]])
    found, hoped = np.empty(9), np.empty(9)
    price_rows(base, places, known, 1.0, 0.0, 0.5, 2e-2, np.zeros(3), -1, found, hoped)
    assert (np.diff(found) >= 0).all()
    assert found[4] < 1.2 * base[4]
    assert found[8] == pytest.approx(base[8])
    assert found[0] == pytest.approx(base[0])
