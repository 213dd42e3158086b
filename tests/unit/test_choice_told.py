"""The sentence about a K: each reason has one, and it holds the figures that were compared."""

from __future__ import annotations

from typing import get_args

import pytest

from engine.messages import Estimates, Reason
from server.api.speculation import choice_sentence

RATES = [100.0, 150.0, 170.0, 160.0]


@pytest.mark.parametrize("reason", get_args(Reason))
def test_every_reason_is_told(reason: Reason) -> None:
    k = 0 if reason in ("off", "baseline") else 2
    estimates = Estimates(
        k=k, reason=reason, rates=RATES, speedup=RATES[k] / RATES[0], num_sequences=3
    )
    sentence = choice_sentence(estimates)
    assert f"Expected of the main proposer for 3 sequences: {RATES[k]:.0f} tokens/s" in sentence
    assert ("1.70 times" in sentence) == (k == 2)
    others = {choice_sentence(Estimates(k=k, reason=r, num_sequences=3)) for r in get_args(Reason)}
    assert len(others) == len(get_args(Reason))


def test_before_the_first_step() -> None:
    assert choice_sentence(Estimates()) == "No step has been made yet."


def test_modes_speak_first() -> None:
    """Law: what the operator said is the reason, and the figures say what it costs."""
    fixed = Estimates(mode="fixed", k=1, reason="fixed", rates=RATES, num_sequences=1, speedup=1.5)
    assert choice_sentence(fixed).startswith("The operator fixed K at 1. Expected of the main")
    assert " for 1 sequence: 150" in choice_sentence(fixed)
    assert "the best other K above 0 is 2 (170)" in choice_sentence(fixed)
    assert choice_sentence(Estimates(mode="off")) == "The operator switched speculation off."
