"""Experience: what guesses were found to be worth, and what their proposer says of them."""

from __future__ import annotations

import numpy as np

from engine.control.controller import StepObservation
from engine.control.estimates import Outcome
from engine.control.experience import Experience

K = 4


def told(outcome: Outcome, sure: list[float]) -> StepObservation:
    return StepObservation(
        num_sequences=1,
        rows=K + 1,
        k=K,
        tokens=outcome.right + 1,
        outcomes=[outcome],
        draft_seconds=1e-3,
        target_seconds=1e-3,
        host_seconds=1e-3,
        confidences=[sure[: outcome.tried]],
    )


def hear(guesses: Experience, *, right: int, rounds: int) -> None:
    """Proposals that are sure of themselves, of which so many guesses are right."""
    outcome, sure = Outcome(K, min(right + 1, K), right), [4.0, 4.0, 4.0, 4.0]
    for _ in range(rounds):
        guesses.remember([sure])
        guesses.learn(K, [outcome], told(outcome, sure), None)


def test_what_is_found_overrules_what_confidences_promise() -> None:
    """Bug: a draft that had been right a thousand times went on as sure of itself in a text where
    it was always wrong. Of its first guesses 95 in a hundred were found to be wrong, and half were
    still taken to be right: speculation went on at seven tenths of the speed without."""
    guesses = Experience(K)
    hear(guesses, right=K, rounds=1000)
    guesses.refresh()
    assert guesses.sure[:, 0].mean() > 0.9
    hear(guesses, right=0, rounds=60)
    guesses.refresh()
    found = guesses.acceptance.chances()[0]
    assert found < 0.2
    assert abs(guesses.sure[:, 0].mean() - found) < 0.02
    [[first, *_]] = guesses.chances.lists([[4.0, 4.0, 4.0, 4.0]])
    assert abs(first - found) < 0.05


def test_by_depth_the_means_are_what_was_found_though_confidences_differ() -> None:
    """Law: confidences say which guesses are right; how many, their outcomes."""
    guesses = Experience(K)
    random = np.random.default_rng(3)
    for _ in range(300):
        sure = random.normal(3.0, 1.5, K).tolist()
        hits = random.random(K) < 1.0 / (1.0 + np.exp(3.0 - np.array(sure)))
        right = int(np.cumprod(hits).sum())
        outcome = Outcome(K, min(right + 1, K), right)
        guesses.remember([sure])
        guesses.learn(K, [outcome], told(outcome, sure), None)
    guesses.refresh()
    alive = np.cumprod(guesses.sure, axis=1).mean(0)
    assert np.allclose(alive, np.cumprod(guesses.acceptance.chances()), atol=0.06)
    assert guesses.sure[:, 0].std() > 0.05


def test_a_draft_far_surer_than_any_before_is_believed_by_its_outcomes() -> None:
    """Bug: where the whole sample was beyond doubt its mean had no odds, nor had anything else."""
    guesses = Experience(K)
    random = np.random.default_rng(5)
    for _ in range(400):
        right = int(random.integers(0, 2)) * K
        sure = [1.0 + 0.01 * bool(right)] * K
        outcome = Outcome(K, min(right + 1, K), right)
        guesses.remember([sure])
        guesses.learn(K, [outcome], told(outcome, sure), None)
    for _ in range(64):
        guesses.remember([[99.0, 99.0]])
    guesses.refresh()
    assert np.isfinite(guesses.sure).all()
    assert np.allclose(guesses.sure.mean(0), guesses.acceptance.chances(), atol=0.02)
