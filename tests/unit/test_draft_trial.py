"""The trial of a new draft: a worse one is removed, another stays, and noise decides nothing."""

from __future__ import annotations

import random

import pytest

from engine.control.adaptive import AdaptiveK
from engine.control.controller import FixedK, KController, Load
from engine.control.draft_trial import ENOUGH, LEAST, DraftTrial, Verdict, speedup
from engine.control.modes import Modes
from engine.control.profile import Profile
from tests.support.controller_world import K_MAX, World, play

ALONE = Load(1)


def judged(old: float, new: float, *, seed: int = 1, trial: DraftTrial | None = None) -> Verdict:
    """Return the verdict on two drafts that guess these shares of tokens right, independently."""
    trial, draw = trial or DraftTrial(FixedK(4), FixedK(4)), random.Random(seed)
    for _ in range(ENOUGH):
        hits = [[draw.random() < share for _ in range(16)] for share in (old, new)]
        trial.add(*hits)
        if (verdict := trial.verdict(ALONE)) is not None:
            return verdict
    raise AssertionError("never judged")


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [(0.7, 0.0, False), (0.7, 0.45, False), (0.7, 0.9, True), (0.3, 0.6, True), (0.0, 0.0, True)],
)
def test_the_worse_goes_and_the_better_stays(old: float, new: float, stays: bool) -> None:
    """Law: the verdict is the same for every seed."""
    assert {judged(old, new, seed=seed).stays for seed in range(20)} == {stays}


def test_an_equal_one_stays() -> None:
    """Law: of two equally good drafts neither is worse. In two hundred trials of 1024 tokens, each
    has a chance below one in a thousand of a false alarm."""
    assert all(judged(0.7, 0.7, seed=seed).stays for seed in range(200))


def test_too_little_is_no_evidence() -> None:
    """Law: there is no verdict before LEAST tokens."""
    trial = DraftTrial(FixedK(4), FixedK(4))
    trial.add([True] * (LEAST - 1), [False] * (LEAST - 1))
    assert trial.verdict(ALONE) is None
    trial.add([True], [False])
    verdict = trial.verdict(ALONE)
    assert verdict is not None
    assert not verdict.stays
    assert "of 64 tokens it would have proposed 0.00, the one before 1.00" in verdict.words


def learnt(world: World) -> AdaptiveK:
    controller = AdaptiveK(K_MAX)
    world.profile(controller)
    play(controller, world, 400)
    return controller


def successor(of: KController, draft: float) -> AdaptiveK:
    costs = of.costs.with_draft(Profile(draft=[(1, draft), (4, draft)]))
    return AdaptiveK(K_MAX, costs=costs)


@pytest.mark.parametrize(("times", "stays"), [(1.0, True), (0.3, True), (8.0, False)])
def test_costs_count_as_agreement_does(times: float, stays: bool) -> None:
    """Law: a draft that agrees as often but takes longer is worse."""
    world = World(alpha=0.7, informed=0.5)
    old = learnt(world)
    trial = DraftTrial(old, successor(old, times * world.draft))
    assert judged(0.7, 0.7, trial=trial).stays == stays


def test_if_neither_draft_pays_agreement_decides() -> None:
    """Law: a draft that is always wrong does not stay merely because K is 0 at the moment."""
    world = World(alpha=0.7, informed=0.5, row=1e-1)
    old = learnt(world)
    assert speedup(old, ALONE, 0.7) == 1.0
    assert not judged(0.7, 0.0, trial=DraftTrial(old, successor(old, world.draft))).stays


def test_a_gain_is_the_rate_at_the_best_k() -> None:
    """Law: the gain equals the rate at the best K by this world's own arithmetic."""
    world = World(alpha=0.7, informed=0.5, noise=0.0)
    expected = world.best_rate / world.rate(0)
    assert speedup(learnt(world), ALONE, 0.7) == pytest.approx(expected, rel=0.1)


def test_a_successor_knows_the_target_and_nothing_of_the_draft_tokens() -> None:
    """Law: the successor inherits the cost of plain decoding, but not the acceptance; the old
    controller resumes where it was."""
    world = World(alpha=0.95, informed=0.5)
    old = learnt(world)
    plain, before = old.costs.plain_seconds(1, 64), old.estimates()
    modes = Modes(old)
    new = successor(old, world.draft)
    modes.replace(new)
    assert modes.estimates().acceptance == AdaptiveK(K_MAX).estimates().acceptance
    play(modes, world, 50)
    assert new.costs.plain_seconds(1, 64) == pytest.approx(plain, rel=0.1)
    assert old.estimates().acceptance == before.acceptance
    modes.replace(old)
    assert set(play(modes, world, 20).ks) != {0}


def test_there_are_no_draft_tokens_while_a_draft_is_install() -> None:
    """Law: K is 0 meanwhile, and the controller learns nothing from these steps. Bug: installed
    after a baseline, in which nothing is looked up, nothing was looked up meanwhile either."""
    world = World(alpha=0.8, informed=0.5)
    modes = Modes(learnt(world))
    while (choice := modes.choose(Load(world.batch))).reason != "baseline":
        modes.update(world.round(modes, choice))
    modes.paused = True
    before = modes.estimates().acceptance
    trace = play(modes, world, 20)
    assert (set(trace.ks), set(trace.reasons)) == ({0}, {"off"})
    assert modes.estimates().acceptance == before
    modes.paused = False
    assert set(play(modes, world, 20).ks) != {0}
