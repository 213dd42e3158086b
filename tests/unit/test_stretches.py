"""Contexts that make steps much dearer are costs of their own (StepCosts.stretch)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.control.adaptive import AdaptiveK
from engine.control.controller import Load, StepObservation
from engine.control.estimates import Outcome
from engine.control.profile import CONTEXT, Profile
from engine.control.step_costs import StepCosts

_TOKEN = 1e-6
_SIZES = [(16, 4e-3), (48, 5e-3)]
_LONG = CONTEXT + 400


def _profile() -> Profile:
    draft = [(16, 2e-4)]
    return Profile(_SIZES, draft=draft, batches={16: _SIZES}, token_seconds={16: (_TOKEN, 0.0)})


def _took(rows: int, length: float) -> float:
    """What a step reads at K = 0 fits the caches up to some length; with guesses it never does."""
    return 7e-3 + _TOKEN * 16 * (length - CONTEXT) if rows > 16 or length >= _LONG else 4e-3


def _step(k: int, length: int, tokens: int) -> StepObservation:
    rows, kept = 16 * (1 + k), tokens - 16
    return StepObservation(
        num_sequences=16,
        rows=rows,
        k=k,
        tokens=tokens,
        outcomes=[*[Outcome(k, k, 1)] * kept, *[Outcome(k, 1, 0)] * (16 - kept)] if k else [],
        draft_seconds=2e-4 * k,
        target_seconds=_took(rows, length),
        host_seconds=1e-4,
        context=16 * length,
    )


def test_what_was_learnt_of_one_length_is_known_when_it_comes_again() -> None:
    """Bug: the caches hold what 16 short texts read without guesses, not what long ones do. When
    their lengths changed all sizes were taken to have become dearer, or cheaper, as K = 0 had."""
    costs = StepCosts()
    costs.profile(_profile())
    for length in (CONTEXT, _LONG) * 3:
        for _ in range(20):
            costs.learn(_step(0, length, 16), fresh=False)
            costs.learn(_step(2, length, 24), fresh=False)
    for length in (CONTEXT, _LONG):
        costs.face(length)
        seconds, _ = costs.by_rows(16, 48)
        told = (seconds[48] - 1e-4) / (seconds[16] - 1e-4)
        assert told == pytest.approx(_took(48, length) / _took(16, length), rel=0.1)


def test_a_length_not_seen_is_as_the_nearest() -> None:
    costs = StepCosts()
    costs.profile(_profile())
    for _ in range(50):
        costs.learn(_step(0, CONTEXT, 16), fresh=False)
    costs.face(CONTEXT)
    near, _ = costs.by_rows(16, 16)
    costs.face(_LONG)
    far, _ = costs.by_rows(16, 16)
    assert far[16] == pytest.approx(near[16] + 16 * _TOKEN * (_LONG - CONTEXT), rel=0.05)


def test_a_length_at_the_border_of_two_classes_is_of_one() -> None:
    costs = StepCosts()
    costs.profile(_profile())
    lengths = range(CONTEXT, CONTEXT + 1000)
    found, held = [], 0
    for length in lengths:
        costs.face(length)
        held = costs.stretch(16, held)
        found.append(held)
    assert found == sorted(found)
    assert max(found) > 3
    (border,) = [at for at, held in zip(lengths, found, strict=True) if held == 1][:1]
    held = 1
    costs.face(border)
    assert 0.0 < costs.left(16, 1) < 1000
    left = costs.left(16, 1)
    costs.face(border + left - 1)
    assert costs.stretch(16, 1) == 1
    costs.face(border + left + 1)
    assert costs.stretch(16, 1) == 2
    for length in (border - 5, border, border - 10, border + 5):
        costs.face(length)
        held = costs.stretch(16, held)
        assert held == 1


def _play(controller: AdaptiveK, lengths: list[int]) -> list[int]:
    """K of each round; half of the first guesses are right."""
    played = []
    for length in lengths:
        k = controller.choose(Load(16, lambda length=length: float(length)))  # type: ignore[misc]
        played.append(k)
        step = _step(k, length, 16 + (8 if k else 0))
        if controller.listens:
            controller.update(step)
    return played


def test_it_chooses_anew_as_soon_as_lengths_are_others() -> None:
    """Bug: K = 0 pays for short texts and guesses for long ones, and after each change of lengths
    dozens of rounds went by until it was found out again."""
    controller = AdaptiveK(2, stops=False)
    controller.profile(_profile())
    for _ in range(6):
        _play(controller, [CONTEXT] * 300)
        _play(controller, [_LONG] * 300)
    short, long = _play(controller, [CONTEXT] * 60), _play(controller, [_LONG] * 60)
    assert sum(k == 0 for k in short[2:]) >= 52
    assert sum(k > 0 for k in long[50:]) >= 8


def _border() -> float:
    """A length at which 16 sequences leave the first class."""
    costs = StepCosts()
    costs.profile(_profile())
    costs.face(CONTEXT)
    return CONTEXT + costs.left(16, 0)


def _told(length: float) -> int:
    """Rounds of 2000 that it was told of, where no guess is right."""
    controller = AdaptiveK(2, stops=False)
    controller.profile(_profile())
    told = 0
    for _ in range(2000):
        step = _step(controller.choose(Load(16, lambda: length)), round(length), 16)
        if controller.listens:
            told += 1
            controller.update(step)
        elif controller.overhears:
            controller.overhear(step.in_short())
    assert controller.reason in ("off", "probe", "trial")
    return told


def test_lengths_that_stay_just_below_a_border_are_no_news() -> None:
    """Bug: where requests came and went and were some tokens too short for the next class all the
    time, K = 0 never rested: 2700 of 3000 rounds were told instead of 95."""
    told = [_told(_border() - below) for below in (60.0, 6.0, 2.0, 0.5)]
    assert max(told) < 5 * told[0]


def test_what_was_learnt_since_is_known_of_other_lengths() -> None:
    """Bug: a class was taken to cost what the nearest did when it was first reached, and stayed so:
    K = 0, found to be much cheaper once it stayed, was as dear as ever where texts got longer, and
    sixteen streams went back to guesses there, time and again."""
    costs = StepCosts()
    costs.profile(_profile())
    medium = CONTEXT + 120
    for length in (CONTEXT, medium):  # both are seen with guesses, and K = 0 once in passing
        for _ in range(20):
            costs.learn(_step(2, length, 24), fresh=False)
    costs.learn(replace(_step(0, medium, 16), target_seconds=7e-3), fresh=False)
    before = _believed(costs, medium)
    for _ in range(60):
        costs.learn(replace(_step(0, CONTEXT, 16), target_seconds=2.5e-3), fresh=False)
        costs.learn(_step(2, CONTEXT, 24), fresh=False)
    assert _believed(costs, CONTEXT) == pytest.approx(2.5 / 7, rel=0.25)
    assert _believed(costs, medium) < 0.9 * before


def test_what_other_lengths_told_weighs_once() -> None:
    """Bug: each lesson of a length was mixed anew with what its neighbours had told before it.
    Where K = 0 fits the caches at one length alone it was told 4 per cent too dear there and 4 too
    cheap at the next, however long they were played (10 and 9 where steps differ by 5)."""
    costs = StepCosts()
    costs.profile(_profile())
    took = {CONTEXT: 4e-3, CONTEXT + 120: 6.5e-3}
    for length, plain in [*took.items()] * 4:
        for _ in range(100):
            costs.learn(replace(_step(0, length, 16), target_seconds=plain), fresh=False)
            costs.learn(_step(2, length, 24), fresh=False)
    for length, plain in took.items():
        assert _believed(costs, length) == pytest.approx(plain / _took(48, length), rel=0.01)


def _believed(costs: StepCosts, length: int) -> float:
    """Seconds of K = 0 by those that the profile's machine with K = 2 takes."""
    costs.face(length)
    seconds, _ = costs.by_rows(16, 48)
    return float((seconds[16] - 1e-4) / (seconds[48] - 1e-4))
