"""When guesses that paid are given up: not for a loss that may be an error of the estimates."""

from __future__ import annotations

import pytest

from engine.control.adaptive import AdaptiveK
from engine.control.controller import Load, StepObservation
from engine.control.estimates import Outcome
from engine.control.profile import Profile

BATCH, RIGHT = 4, 2  # guesses of each step, and those of them that are kept
TARGET = 4e-3  # seconds of a forward, whatever its rows


def draft_seconds(speedup: float) -> float:
    """Of one guess each, with which guessing is so much faster than K = 0."""
    return TARGET * ((BATCH + RIGHT) / BATCH / speedup - 1.0)


def play(controller: AdaptiveK, draft: float, rounds: int = 1) -> int:
    """Those of the rounds in which it guessed."""
    guessed = 0
    for _ in range(rounds):
        k = controller.choose(Load(BATCH))
        guessed += k
        outcomes = [Outcome(k, k, k * (i < RIGHT)) for i in range(BATCH)]
        rows, tokens = BATCH * (1 + k), BATCH + k * RIGHT
        seen = StepObservation(BATCH, rows, k, tokens, outcomes, k * draft, TARGET, 0.0)
        if controller.listens:
            controller.update(seen)
        elif controller.overhears:
            controller.overhear(seen.in_short())
    return guessed


@pytest.mark.parametrize(("speedup", "stays"), [(1.1, True), (0.99, True), (0.94, False)])
def test_a_small_loss_does_not_turn_it_off(speedup: float, stays: bool) -> None:
    """Law: at K = 0 it does not see what it misses, so it goes there only if that gains more than
    the estimates may err by. Drafting becomes dearer little by little, all else is as it was."""
    controller = AdaptiveK(1, stops=False)
    controller.profile(Profile([(1, TARGET), (64, TARGET)], [(1, draft_seconds(1.1))]))
    assert play(controller, draft_seconds(1.1), 200) > 150
    for part in range(200):
        play(controller, draft_seconds(1.1 + (speedup - 1.1) * part / 200))
    play(controller, draft_seconds(speedup), 600)
    guessed = play(controller, draft_seconds(speedup), 400)
    assert guessed > 350 if stays else guessed < 40
