from engine.control.skipped_rounds import SkippedRounds


def test_there_are_as_many_as_were_begun() -> None:
    """Law: after so many rounds it says no, and none is counted twice."""
    rests = SkippedRounds()
    assert not rests.go()
    rests.begin(3, 5)
    assert [rests.go() for _ in range(7)] == [True] * 5 + [False] * 2
    assert rests.k == 3
    assert rests.end() == 5
    assert rests.end() == 0


def test_one_in_so_many_is_overheard() -> None:
    """Law: of nine rounds, one in three of which is overheard, three are."""
    rests = SkippedRounds()
    rests.begin(2, 9, every=3)
    overheard = []
    while rests.go():
        overheard.append(rests.is_overheard)
    assert overheard == [False, False, True] * 3


def test_what_ends_them_early_leaves_none_over() -> None:
    """Law: a batch of another size ends them, and what begins then has its own number."""
    rests = SkippedRounds()
    rests.begin(1, 8)
    assert rests.go()
    assert rests.end() == 1
    assert not rests.go()
    rests.begin(0, 0)
    assert not rests.go()
