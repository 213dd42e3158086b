"""PendingObservations: steps that are learnt from later, and when the controller does so."""

from __future__ import annotations

import numpy as np

from engine.control.adaptive import AdaptiveK
from engine.control.controller import Load, StepObservation
from engine.control.estimates import Outcome
from engine.control.experience import Experience
from engine.control.pending_observations import PendingObservation, PendingObservations
from engine.control.step_costs import StepCosts
from tests.support.controller_world import World, adaptive, play

K = 4


def step(right: int, seconds: float = 1e-3) -> StepObservation:
    outcomes = [Outcome(K, min(right + 1, K), right)] * 2
    tokens = 2 * (right + 1)
    return StepObservation(2, 2 * (K + 1), K, tokens, outcomes, 1e-4, seconds, 1e-4)


def steps() -> list[StepObservation]:
    return [step(right=i % 5, seconds=1e-3 * (1 + i / 50)) for i in range(40)]


def learnt(together: int) -> tuple[Experience, StepCosts]:
    guesses, costs = Experience(K), StepCosts()
    lessons = PendingObservations(guesses, costs, stops=False)
    for seen in steps():
        lessons.add(PendingObservation(seen, seen.outcomes, None, rounds=1, fresh=True))
        if len(lessons) == together:
            lessons.learn()
            assert not len(lessons)
    return guesses, costs


def test_what_is_learnt_later_is_what_would_have_been_learnt_at_once() -> None:
    """Law: of guesses and of costs, in the order in which it was told."""
    (guesses, costs), (other, others) = learnt(1), learnt(8)
    assert guesses.acceptance.chances() == other.acceptance.chances()
    np.testing.assert_array_equal(costs.by_rows(2, 12)[0], others.by_rows(2, 12)[0])
    assert costs.drafting(2) == others.drafting(2)


def test_a_step_whose_costs_say_nothing_teaches_guesses_only() -> None:
    """Law: `rounds` 0 leaves the costs as they are."""
    guesses, costs = Experience(K), StepCosts()
    before, hazard = costs.by_rows(2, 12)[0], guesses.acceptance.chances()
    lessons = PendingObservations(guesses, costs, stops=False)
    for seen in steps():
        lessons.add(PendingObservation(seen, seen.outcomes, None, rounds=0, fresh=True))
    lessons.learn()
    np.testing.assert_array_equal(costs.by_rows(2, 12)[0], before)
    assert guesses.acceptance.chances() != hazard


def test_it_is_said_when_guesses_fare_in_another_way() -> None:
    """Law: once, by the lessons that show it."""
    lessons = PendingObservations(Experience(K), StepCosts(), stops=False)
    found = []
    for right in [K] * 60 + [0] * 60:
        seen = step(right)
        lessons.add(PendingObservation(seen, seen.outcomes, None, rounds=1, fresh=True))
        found.append(lessons.learn())
    assert not any(found[20:60])  # at first they surprise whoever knows nothing
    assert any(found[60:80])


def test_a_choice_knows_all_that_was_told_before_it() -> None:
    """Law: K is chosen from what all rounds before it told, however they were put off."""
    world = World(alpha=0.9, batch=2)
    controller = adaptive(world)
    for _ in range(200):
        chosen = controller._spells._chosen
        k = controller.choose(Load(world.batch))
        if not controller._rests._gone and controller._spells._chosen <= min(chosen, 1):
            assert not len(controller._lessons)
        controller.update(world.round(controller, k))
        assert len(controller._lessons) < 4


def test_guesses_are_not_weighed_one_by_one_where_that_gains_nothing() -> None:
    """Law: rows that cost next to nothing are all run. To weigh each guess against its row took 1 %
    of a round of one stream, and left none out."""
    cheap = adaptive(World(alpha=0.7, batch=1, row=1e-9, informed=1.0))
    play(cheap, World(alpha=0.7, batch=1, row=1e-9, informed=1.0), 200)
    assert not cheap._cuts
    dear = adaptive(World(alpha=0.7, batch=8, row=4e-4, informed=1.5))
    play(dear, World(alpha=0.7, batch=8, row=4e-4, informed=1.5), 200)
    assert isinstance(dear, AdaptiveK)
    assert dear._cuts
