"""Exploration: baselines, which are steps at K = 0 while speculation pays, and their length."""

from __future__ import annotations

from engine.control.exploration import Exploration


def baselines(explore: Exploration, *, gain: float, rounds: int) -> list[int]:
    """Return the length in steps of each baseline while speculation gains `gain`."""
    found, alone = list[int](), True
    for _ in range(rounds):
        is_baseline = explore.while_on(1.0, gain=gain) == "baseline"
        if is_baseline:
            found = [*found, 1] if alone else [*found[:-1], found[-1] + 1]
        explore.end(asked=not is_baseline, lost=0.1 if is_baseline else 0.0, usual=1.0)
        alone = not is_baseline
    return found


def test_a_baseline_is_longer_where_k_0_is_close() -> None:
    """Bug: the first step without a proposal costs a third more than later ones, since the
    drafter's weights are still in the caches. A baseline of that step alone made K = 0 look slow
    for good, and speculation stayed on where it lost a fifth."""
    explore = Exploration()
    explore.restart(1)
    first, *later = baselines(explore, gain=0.1, rounds=300)
    assert first == 1
    assert len(later) == 2
    assert min(later) > 3


def test_one_step_is_enough_where_speculation_gains_much() -> None:
    """Law: a baseline that can hardly change the choice is as short as possible."""
    explore = Exploration()
    explore.restart(1)
    assert baselines(explore, gain=0.4, rounds=1400) == [1, 1, 1, 1]


def test_a_batch_size_that_returns_is_not_explored_anew() -> None:
    """Bug: with a load that alternates between 15 and 16 requests, each change restarted the
    exploration of K = 0: a baseline after six steps, and again after 48."""
    explore = Exploration()

    def first_after(size: int) -> int:
        explore.restart(size)
        for count in range(1, 200):
            if explore.while_on(1.0, gain=0.4) == "baseline":
                return count
            explore.end(asked=True, lost=0.0, usual=1.0)
        raise AssertionError

    assert first_after(5) == 6
    explore.restart(4)
    assert first_after(5) == 24
    assert first_after(6) == 6


def test_exploration_loses_a_small_share_of_the_time() -> None:
    """Law: after a baseline that loses ten steps' time, none follows until that is paid off."""
    explore = Exploration()
    explore.restart(1)
    played = 0
    for _ in range(2000):
        is_baseline = explore.while_on(1.0, gain=0.05) == "baseline"
        played += is_baseline
        explore.end(asked=not is_baseline, lost=10.0 if is_baseline else 0.0, usual=1.0)
    assert 0 < played < 30
