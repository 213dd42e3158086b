"""Exploration: how long a baseline is, some rounds at K = 0 while guesses pay."""

from __future__ import annotations

from engine.control.exploration import Exploration


def baselines(explore: Exploration, *, gain: float, rounds: int) -> list[int]:
    """Rounds of each, where guesses gain so much."""
    found, alone = list[int](), True
    for _ in range(rounds):
        is_baseline = explore.while_on(1.0, gain=gain) == "baseline"
        if is_baseline:
            found = [*found, 1] if alone else [*found[:-1], found[-1] + 1]
        explore.over(asked=not is_baseline, lost=0.1 if is_baseline else 0.0, usual=1.0)
        alone = not is_baseline
    return found


def test_a_baseline_is_long_where_the_choice_is_close() -> None:
    """Bug: the first round without guesses costs a third more than later ones, as long as the
    drafter's weights are in the caches; a baseline of that one round made K = 0 look dear for good,
    and speculation stayed on where it lost a fifth."""
    explore = Exploration()
    explore.restart(1)
    assert baselines(explore, gain=0.1, rounds=300) == [1, 4, 4]


def test_one_round_is_enough_where_guesses_gain_much() -> None:
    """Law: what could hardly change the choice is not paid for."""
    explore = Exploration()
    explore.restart(1)
    assert baselines(explore, gain=0.4, rounds=1400) == [1, 1, 1, 1]


def test_a_size_that_comes_back_is_no_new_one() -> None:
    """Bug: a load that goes to and fro between 16 requests and 15 had its K = 0 looked at after six
    rounds, and after 48 more, each time."""
    explore = Exploration()

    def first_after(size: int) -> int:
        explore.restart(size)
        for count in range(1, 200):
            if explore.while_on(1.0, gain=0.4) == "baseline":
                return count
            explore.over(asked=True, lost=0.0, usual=1.0)
        raise AssertionError

    assert first_after(5) == 6
    explore.restart(4)
    assert first_after(5) == 24
    assert first_after(6) == 6


def test_what_exploration_loses_is_a_small_share() -> None:
    """Law: a baseline that loses as much as ten rounds waits until that is paid off."""
    explore = Exploration()
    explore.restart(1)
    played = 0
    for _ in range(2000):
        is_baseline = explore.while_on(1.0, gain=0.05) == "baseline"
        played += is_baseline
        explore.over(asked=not is_baseline, lost=10.0 if is_baseline else 0.0, usual=1.0)
    assert 0 < played < 30
