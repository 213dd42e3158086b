"""Exploration: how long a baseline is, some rounds at K = 0 while guesses pay."""

from __future__ import annotations

from engine.control.exploration import Exploration


def baselines(explore: Exploration, *, first: float, later: float, rounds: int) -> list[int]:
    """Rounds of each; `first` is what the first takes of usual seconds, `later` the others."""
    found, alone = list[int](), True
    for _ in range(rounds):
        is_baseline = explore.while_on(1.0, gain=0.4, varies=True) == "baseline"
        if is_baseline:
            found = [*found, 1] if alone else [*found[:-1], found[-1] + 1]
        explore.over(asked=not is_baseline, seconds=first if alone else later, usual=1.0)
        alone = not is_baseline
    return found


def test_a_baseline_is_long_where_its_first_rounds_are_dearer() -> None:
    """Bug: the first round without guesses costs a third more than the tenth does, as long as the
    drafter's weights are in the caches; a baseline of that one round made K = 0 look dear for good,
    and speculation stayed on where it lost a fifth."""
    explore = Exploration()
    explore.restart(1)
    assert baselines(explore, first=1.3, later=1.0, rounds=1400) == [1, 10, 10, 10]


def test_a_crowds_baseline_is_shorter() -> None:
    """Bug: of sixty rounds of a crowd that guesses made 1.8 times as fast, eleven were played at
    K = 0, ten of them to see what the last two took; what that costs falls soon where a round takes
    as long as a crowd's."""
    explore = Exploration()
    explore.restart(5)
    assert baselines(explore, first=1.3, later=1.0, rounds=200) == [1, 4]


def test_a_size_that_comes_back_is_no_new_one() -> None:
    """Bug: a load that goes to and fro between 16 requests and 15 had its K = 0 looked at after six
    rounds, and after 48 more, each time."""
    explore = Exploration()

    def first_after(size: int) -> int:
        explore.restart(size)
        for count in range(1, 200):
            if explore.while_on(1.0, gain=0.4, varies=True) == "baseline":
                return count
            explore.over(asked=True, usual=1.0)
        raise AssertionError

    assert first_after(5) == 6
    explore.restart(4)
    assert first_after(5) == 24
    assert first_after(6) == 6


def test_one_round_is_enough_where_the_first_is_like_the_others() -> None:
    """Law: what tells nothing new is not paid for; nor, once that is known, of a larger batch."""
    explore = Exploration()
    explore.restart(1)
    assert baselines(explore, first=1.0, later=1.0, rounds=1400) == [1, 10, 1, 1]
    explore.restart(5)
    assert baselines(explore, first=1.3, later=1.0, rounds=200) == [1, 1]


def test_a_look_is_as_cold_as_a_baseline_begins() -> None:
    """Bug: three rounds of a trial, told and with cold caches, made guesses of four streams look
    a quarter dearer than they are, and K = 0 was played where K = 2 gains a tenth."""

    def cold(*, first: float) -> set[bool]:
        explore = Exploration()
        explore.restart(1)
        baselines(explore, first=first, later=1.0, rounds=120)
        explore.turned(back=False)
        found = set()
        for _ in range(100):
            if explore.while_off(1.0, alone=False) != "usual":
                found.add(explore.is_cold)
            explore.over(asked=explore.asks, seconds=1.0, usual=1.0)
        return found

    assert cold(first=1.3) == {True}
    assert cold(first=1.0) == {False}
