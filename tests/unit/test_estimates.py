"""How guesses fare by depth: learnt, faded, doubted, and found out in hindsight."""

from __future__ import annotations

import random

import pytest

from engine.control.acceptance import AcceptanceEstimate, _rounds
from engine.scheduling.step_record import Outcome

K = 4


class Counted(AcceptanceEstimate):
    """It counts its doubts."""

    doubts = 0

    def limit_weight(self, trials: float) -> None:
        self.doubts += 1
        super().limit_weight(trials)


def outcome(rng: random.Random, alpha: float) -> Outcome:
    right = 0
    while right < K and rng.random() < alpha:
        right += 1
    return Outcome(K, min(right + 1, K), right)


def rounds(estimate: AcceptanceEstimate, alpha: float, count: int, *, batch: int = 1) -> None:
    rng = random.Random(7)
    for _ in range(count):
        estimate.update(K, [outcome(rng, alpha) for _ in range(batch)])


def test_expectations_by_depth() -> None:
    """Two guesses whenever four are allowed, both always right: nothing is known of the third, and
    nothing is to be had from it."""
    estimate = AcceptanceEstimate(4)
    for _ in range(300):
        estimate.update(4, [Outcome(2, 2, 2)])
    assert estimate.offering() == pytest.approx([1, 1, 0, 0], abs=0.01)
    assert estimate.chances()[:2] == pytest.approx([1, 1], abs=0.02)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_it_learns_the_chance_at_each_depth(alpha: float) -> None:
    """Two deviations of what 192 rounds tell at the first depth; fewer get to the last."""
    estimate = AcceptanceEstimate(K)
    rounds(estimate, alpha, 600)
    assert estimate.chances()[0] == pytest.approx(alpha, abs=0.08)
    assert estimate.chances()[-1] == pytest.approx(alpha, abs=0.15)
    assert 1.0 - estimate.rejection == pytest.approx(alpha, abs=0.06)


def test_a_spell_of_hits_lifts_every_depth() -> None:
    """Law: what the drafter would have guessed counts as if it had been verified."""
    estimate = AcceptanceEstimate(6)
    for _ in range(50):
        estimate.update(6, [Outcome(6, 1, 0)])
    before = estimate.chances()
    estimate.agree([[True] * 21, [True] * 21])
    assert all(new > old for new, old in zip(estimate.chances(), before, strict=True))


def test_one_position_alone_tells_of_the_drafter() -> None:
    """As the one that a single round at K = 0 leaves behind."""
    estimate = AcceptanceEstimate(2)
    before = estimate.rejection
    estimate.agree([[False]] * 40)
    assert estimate.rejection > before
    estimate.agree([[True]] * 400)
    assert estimate.rejection < before


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [
        ("F", [(1, 0)]),
        ("FF", [(1, 0), (1, 0)]),
        ("HF", [(2, 1)]),
        ("HHF", [(3, 2)]),
        ("HHHF", [(3, 3)]),
        ("HHHH", [(3, 3)]),
        ("HHHHH", [(3, 3), (1, 1)]),
        ("HHHFHF", [(3, 3), (2, 1)]),
        ("HH", [(2, 2)]),
        ("FHH", [(1, 0), (2, 2)]),
        ("", []),
    ],
)
def test_a_stretch_is_what_proposals_would_have_come_to(
    stretch: str, expected: list[tuple[int, int]]
) -> None:
    """By hand, for proposals of three: a round ends with its first miss, or with the token behind
    three hits, whatever that is; the end of the stretch is not known to be a miss."""
    found = _rounds([letter == "H" for letter in stretch], 3)
    assert found == [Outcome(3, tried, right) for tried, right in expected]


@pytest.mark.parametrize(("first", "then"), [(0.9, 0.1), (0.1, 0.9)])
def test_a_change_is_noticed_in_a_few_rounds(first: float, then: float) -> None:
    """Law: it need not wait until 192 rounds have faded."""
    estimate = Counted(K)
    rounds(estimate, first, 500)
    estimate.doubts = 0
    rounds(estimate, then, 24)
    assert estimate.doubts > 0
    assert estimate.chances()[0] == pytest.approx(then, abs=0.25)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_no_change_is_seen_where_there_is_none(alpha: float, batch: int) -> None:
    """Law: of 5000 rounds alike, hardly one passes for a change."""
    estimate = Counted(K)
    rounds(estimate, alpha, 5000, batch=batch)
    assert estimate.doubts <= 10


def test_doubt_lets_news_overturn_the_past() -> None:
    """Law: the estimate stays, its weight goes."""
    sure, doubted = AcceptanceEstimate(K), AcceptanceEstimate(K)
    for estimate in (sure, doubted):
        rounds(estimate, 0.2, 400)
    doubted.limit_weight(4.0)
    assert doubted.chances()[0] == pytest.approx(sure.chances()[0], abs=0.15)
    for estimate in (sure, doubted):
        estimate.update(K, [Outcome(K, K, K)])
    assert doubted.chances()[0] > sure.chances()[0] + 0.05


@pytest.mark.parametrize("alpha", [0.4, 0.8])
def test_a_crowd_is_known_better_than_one_alone(alpha: float) -> None:
    """Law: old outcomes make room by rounds as well, so that what a crowd tells is averaged over
    more than the last few. Bug: a draft that paid a crowd 13 % was switched off by six rounds."""
    estimate, rng = AcceptanceEstimate(K), random.Random(3)
    seen = []
    for _ in range(300):
        estimate.update(K, [outcome(rng, alpha) for _ in range(16)])
        seen.append(estimate.chances()[0])
    assert max(abs(chance - alpha) for chance in seen[100:]) < 0.06


def doubted(seed: int, rounds_: int) -> bool:
    """Whether a change is seen in rounds of eight texts, each there twice, that are hard to guess
    though all before them were not."""
    estimate, rng = Counted(K), random.Random(seed)
    for _ in range(100):
        estimate.update(K, [outcome(rng, 0.8) for _ in range(16)])
    estimate.doubts = 0
    for _ in range(rounds_):
        estimate.update(K, 2 * [outcome(rng, 0.5) for _ in range(8)])
    return estimate.doubts > 0


def test_texts_that_are_alike_are_no_other_world() -> None:
    """Bug: the first tokens of sixteen replies, harder to guess than the rest and much alike, were
    taken for a change in every second such round; a real one is seen all the same."""
    assert sum(doubted(seed, 1) for seed in range(40)) < 8
    assert all(doubted(seed, 8) for seed in range(40))
