"""When a choice of K is due again."""

from __future__ import annotations

from engine.control.dwell_time import DwellTime


def _choices(spells: DwellTime, rounds: int) -> list[int]:
    """In which of so many rounds a crowd's K is chosen while guesses pay."""
    due = []
    for i in range(rounds):
        spells.go()
        if spells.is_due(on=True, crowd=True):
            spells.choose()
            due.append(i)
    return due


def test_after_a_change_a_crowd_chooses_anew_soon() -> None:
    """Bug: texts that begin together are hard together; after two such rounds the past was
    forgotten, K=2 chosen where 6 pays, and not looked at again for twelve rounds."""
    spells = DwellTime()
    _choices(spells, 200)
    spells.forget()
    assert _choices(spells, 26) == [0, 3, 6, 12, 24]


def test_the_longer_all_is_the_same_the_rarer_are_choices() -> None:
    """Law: of a crowd at least twelve rounds apart, at most sixty-four."""
    due = _choices(DwellTime(), 1000)
    apart = [later - earlier for earlier, later in zip(due, due[1:], strict=False)]
    assert apart == sorted(apart)
    assert apart[0] == 12
    assert apart[-1] == 64
