"""Which rounds the controller is told of."""

from __future__ import annotations

from engine.control.chances import FEW
from engine.control.dwell_time import DwellTime
from engine.control.exploration import Exploration
from engine.control.observation_schedule import ObservationSchedule


def heard(
    sequences: int,
    *,
    known: bool,
    on: bool = True,
    rounds: int = 40,
    spell: int = 100,
    usual: float = 1e-3,
) -> tuple[int, int]:
    """Of so many rounds those that are told, and those whose costs are learnt."""
    spells = DwellTime()
    hearing = ObservationSchedule(spells, Exploration())
    hearing.usual = usual
    if known:
        spells.go(spell)
    told = learnt = 0
    for _ in range(rounds):
        hearing.play(on=on)
        told += hearing.wants(sequences)
        learnt += hearing.learns_costs()
    return told, learnt


def test_what_is_new_is_heard_the_more_often_the_fewer_they_are() -> None:
    """Law: four requests tell in ten rounds what one tells in 40; telling takes time."""
    assert heard(1, known=False) == heard(3, known=False) == (24, 40)  # 8, and 16 of the other 32
    assert heard(4, known=False) == heard(FEW, known=False) == (16, 40)  # and one of four of them
    assert heard(FEW + 1, known=False)[0] == 10


def test_what_is_known_is_heard_now_and_then() -> None:
    """Law: one round of sixteen while guesses pay. Bug: to be told of sixteen takes a twelfth of
    their round, and was done for one of three on average."""
    told = [heard(several, known=True, rounds=48)[0] for several in (1, 2, FEW, 32)]
    assert told == [3, 3, 3, 3]


def test_what_has_been_known_for_long_is_heard_half_as_often() -> None:
    """Law: one round of 32 is enough then; what changes is as new."""
    assert heard(1, known=True, spell=200, rounds=96, usual=5e-4)[0] == 3
    assert heard(FEW, known=True, spell=200, rounds=96)[0] == 3


def test_long_rounds_are_heard_more_often() -> None:
    """Law: to be told takes a fixed time, and of that no more than a hundredth of all is spent. Of
    a model whose rounds take 60 ms each can be heard, of a crowd's of 20 ms one of five."""
    assert heard(1, known=True, rounds=48, usual=6e-2)[0] == 48
    assert heard(32, known=True, rounds=45, usual=2e-2)[0] == 9
    assert heard(1, known=True, rounds=48, usual=0.0)[0] == 3  # nothing is known of it


def test_the_first_rounds_without_guesses_tell_no_costs() -> None:
    """Law: until the caches hold what K = 0 needs, it looks dearer than it is."""
    assert heard(4, known=False, on=False) == (36, 36)


def test_a_crowds_baseline_tells_costs_though_it_is_short() -> None:
    """Bug this guards against: K = 0 that is never learnt again while guesses pay."""
    explore = Exploration()
    hearing = ObservationSchedule(DwellTime(), explore)
    explore.restart(5)
    learnt = 0
    for _ in range(200):
        is_baseline = explore.while_on(1.0, gain=0.1, varies=True) == "baseline"
        hearing.play(on=not is_baseline)
        learnt += is_baseline and hearing.wants(16) and hearing.learns_costs()
        explore.over(asked=not is_baseline, seconds=1.0, usual=1.0)
    assert learnt == 5  # the first, which is alone, and two of four, twice


def test_rounds_that_it_rested_count() -> None:
    """Law: costs drift by the time that passed, told or not."""
    hearing = ObservationSchedule(DwellTime(), Exploration())
    hearing.play(on=False)
    hearing.rest(15)
    hearing.play(on=False)
    assert hearing.unlearned == 17


def test_of_hindsight_some_told_rounds_tell() -> None:
    """Bug: only rounds that were told had the drafter's hindsight judged, and only they said what
    drafting costs: with sixteen requests a quarter more than it does."""
    spells = DwellTime()
    hearing = ObservationSchedule(spells, Exploration())
    found = [hearing.looks_back(behind=False) for _ in range(6)]
    assert found == [True, False] * 3
    assert hearing.looks_back(behind=True)
    spells.go(100)
    found = [hearing.looks_back(behind=False) for _ in range(8)]
    assert found == [False, False, False, True] * 2
    assert hearing.looks_back(behind=True)


def test_where_a_crowd_never_stays_without_guesses_it_is_heard_as_it_is() -> None:
    """Bug: a batch that went to and fro between 15 and 16, one with guesses and one without, never
    stayed at K = 0 for the 24 rounds after which these are more than a bound: that K = 0 had become
    dearer was not learnt, and guesses that paid stayed off."""
    explore = Exploration()
    explore.restart(5)
    hearing = ObservationSchedule(DwellTime(), explore)
    settled = 0
    for _ in range(40):
        hearing.play(on=False)
        settled += hearing.is_settled
        hearing.play(on=True)
    assert settled == 0
    for _ in range(40):
        hearing.play(on=False)
        settled += hearing.is_settled
        hearing.play(on=True)
    assert settled > 20
    for _ in range(30):
        hearing.play(on=True)
    hearing.play(on=False)
    assert not hearing.is_settled
