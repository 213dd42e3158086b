"""The controller of a proposer of token trees: K counts nodes, the likeliest first."""

from __future__ import annotations

import pytest

from engine.control.acceptance import AcceptanceEstimate
from engine.control.adaptive import AdaptiveK
from engine.control.profile import Profile
from engine.scheduling.step_record import Outcome
from tests.support.controller_world import Trees, play

NODES = 24


def adaptive(world: Trees) -> AdaptiveK:
    controller = AdaptiveK(NODES, stops=False, trees=True)
    target = [(n, world.target(n)) for n in (1, 2, 3, 5, 9, 16, 64, 256)]
    controller.costs.set_profile(Profile(target, [], world.host))
    return controller


def test_the_chance_of_a_node_is_how_often_it_was_accepted() -> None:
    """Law: a node counts whenever it was verified, whatever became of those before it."""
    estimate = AcceptanceEstimate(4, trees=True)
    for i in range(400):
        estimate.update(4, [Outcome(4, 4, 1, [(0, 1, 2, 2)[i % 4]])])
    assert estimate.chances() == pytest.approx([0.25, 0.25, 0.5, 0.0], abs=0.06)
    assert estimate.survival(estimate.chances()).sum() == pytest.approx(1.0, abs=0.1)


def test_a_node_that_was_not_verified_keeps_its_estimate() -> None:
    """Law: a node beyond the budget keeps its estimate."""
    estimate = AcceptanceEstimate(2, trees=True)
    for _ in range(200):
        estimate.update(2, [Outcome(2, 2, 1, [1])])
    for _ in range(200):
        estimate.update(1, [Outcome(1, 1, 0, [])])
    assert estimate.chances()[1] > 0.9


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("row", [2e-5, 2e-4, 6e-4])
def test_a_tree_is_as_large_as_pays(row: float, batch: int) -> None:
    """Law: with cheap or expensive rows, at least 0.96 of the best fixed number of nodes."""
    world = Trees(alpha=0.0, row=row, batch=batch)
    controller = adaptive(world)
    play(controller, world, 400)
    trace = play(controller, world, 1500)
    assert trace.rate > 0.96 * world.best(NODES)


def test_no_tree_where_it_loses() -> None:
    """Law: there is no tree if one row costs more than all nodes gain."""
    world = Trees(alpha=0.0, row=4e-3)
    controller = adaptive(world)
    play(controller, world, 400)
    trace = play(controller, world, 1500)
    assert trace.rate > 0.98 * world.rate(0)
