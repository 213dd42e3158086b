"""The sentence that explains a K: each reason has one."""

from __future__ import annotations

from typing import get_args

from engine.messages import Estimates, Reason
from server.api.speculation import choice_sentence


def test_every_reason_has_a_sentence() -> None:
    """Law: each reason has a sentence of its own."""
    reasons = get_args(Reason)
    sentences = {choice_sentence(Estimates(k=2, reason=r, num_sequences=3)) for r in reasons}
    assert len(sentences) == len(reasons)
    assert "K = 2 has the highest expected tokens per second." in sentences


def test_before_the_first_step() -> None:
    assert choice_sentence(Estimates()) == "No step has run yet."


def test_the_operators_mode_is_the_reason() -> None:
    """Law: if the operator set the mode, the sentence says so."""
    fixed = Estimates(mode="fixed", k=1, reason="fixed", num_sequences=1)
    assert choice_sentence(fixed) == "The operator fixed K at 1."
    assert choice_sentence(Estimates(mode="off")) == "The operator switched speculation off."
