"""Calibration of confidence: the fit finds a known relation and ignores noise."""

from __future__ import annotations

import numpy as np
import pytest

from engine.control.acceptance import CAP, Array, Calibration

ODDS = np.array([0.8, 0.0, -0.8])  # of the priors at three depths


def learn(calibration: Calibration, slope: float, trials: int, *, scale: float = 1.0) -> None:
    """Learn tokens whose log-odds are the prior's plus `slope` per deviation of confidence."""
    rng = np.random.default_rng(3)
    for _ in range(trials // 48):
        odds = ODDS[rng.integers(0, 3, 48)]
        surprise = rng.normal(size=48)
        hits = rng.random(48) < chance(odds + slope * surprise)
        confidences = scale * (3.0 + surprise)
        found = (odds.tolist(), confidences.tolist(), hits.tolist())
        calibration.learn(zip(*found, strict=True))


def chances(calibration: Calibration, odds: float, confidences: Array) -> Array:
    """Return the chances of tokens that stand alone, computed as in a step."""
    bases, weight = calibration.line(np.array([odds]))
    return chance(bases[0] + weight * np.minimum(confidences, CAP))


def weight_of(calibration: Calibration) -> float:
    """Return the weight of a confidence."""
    return calibration.line(ODDS)[1]


def chance(odds: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-odds)))


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("slope", [0.5, 1.5])
def test_it_learns_a_known_logistic(slope: float, scale: float) -> None:
    """Law: calibrated within a few per cent at each depth, whatever the scale of the confidence."""
    calibration = Calibration()
    learn(calibration, slope, 12_000, scale=scale)
    surprise = np.linspace(-1.5, 1.5, 7)
    for odds in ODDS:
        found = chances(calibration, odds, scale * (3.0 + surprise))
        assert np.abs(found - chance(odds + slope * surprise)).max() < 0.08


def test_a_useless_confidence_is_ignored() -> None:
    calibration = Calibration()
    before = weight_of(calibration)
    learn(calibration, 0.0, 12_000)
    assert weight_of(calibration) < 0.1 < before
    for odds in ODDS:
        found = chances(calibration, odds, np.array([1.5, 3.0, 4.5]))
        assert found == pytest.approx([float(chance(odds))] * 3, abs=0.06)


def test_it_follows_a_confidence_that_becomes_useless() -> None:
    calibration = Calibration()
    learn(calibration, 2.0, 6_000)
    assert weight_of(calibration) > 1.0
    learn(calibration, 0.0, 12_000)
    assert weight_of(calibration) < 0.25


def test_chances_are_chances_for_any_numbers() -> None:
    """Law: chances are in [0, 1] and never fall with confidence, even for hostile values;
    confidences above 12 are all treated alike."""
    calibration = Calibration()
    calibration.learn([(0.0, 99.0, True), (0.0, -1e6, False)] * 48)
    found = chances(calibration, 0.0, np.array([-1e6, -50.0, 0.0, 5.0, 12.0, 99.0]))
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (found <= 1).all()
    assert (np.diff(found) >= 0).all()
    assert found[4] == found[5]
