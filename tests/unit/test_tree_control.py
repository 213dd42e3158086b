"""The controller of a proposer of token trees: K counts nodes, the likeliest first."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace

from engine.control.acceptance import AcceptanceEstimate, ProposalModel
from engine.control.adaptive import AdaptiveK
from engine.control.controller import Choice, KController, Load
from engine.control.profile import Profile
from engine.scheduling.step_record import Agreement, Outcome, StepRecord
from engine.speculation.drafts import MOST_TREES
from tests.support.controller_world import Trees, play

NODES, TOKENS = 24, 400  # nodes of a tree; tokens of a text, for each sequence
SEEDS = 4


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


def test_trees_compared_in_hindsight_count_like_verified_ones() -> None:
    """Law: a tree that was compared with the text counts like a verified one. Bug: if all had fewer
    than K nodes, the missing ones were no evidence."""
    seen, compared = ProposalModel(4, trees=True), ProposalModel(4, trees=True)
    for hits in ([True, False, True], [False, True, False], [False, False, False]) * 20:
        path = [node for node, hit in enumerate(hits) if hit]
        seen.add(4, [Outcome(3, 3, len(path), path)], [[1.0, 0.5, 0.0]])
        seen.learn()
        found = list(zip((1.0, 0.5, 0.0), hits, strict=True))
        compared.learn_in_hindsight([Agreement(0, 0, found, 4)])
    for model in (seen, compared):
        model.refresh()
    assert compared.acceptance.chances() == pytest.approx(seen.acceptance.chances())
    assert compared.chances.mean(0) == pytest.approx(seen.chances.mean(0))
    for model in (seen, compared):
        assert model.acceptance.proposal_rates() == pytest.approx([1, 1, 1, 0], abs=0.05)


@dataclass
class Heads(Trees):
    """Heads that know in hindsight the first node that they would have proposed in the last steps
    at K = 0, if they `compare`, which takes a sixth of a row each."""

    compare: bool = True
    steps: int = 0

    def round(self, controller: KController, choice: Choice) -> StepRecord:
        record, late = super().round(controller, choice), list[Agreement]()
        for _ in range(self.batch if choice.uses_hindsight and self.compare else 0):
            at = 0
            while at < self.steps:
                path = self.accepted(1)
                late.append(Agreement(0, at, [(0.0, bool(path))], 1))
                at += 1 + len(path)
        took = self.steps * self.row / 6 * self.batch if late else 0.0
        self.steps = 0 if choice.k else min(self.steps + 1, MOST_TREES)
        return replace(record, hindsight=late, draft_seconds=took)


def share_of_best(seed: int, *, compare: bool, batch: int, row: float) -> float:
    """Return the tokens per second on texts that are hard, then easy, again and again, divided by
    those of the best number of nodes on each."""
    kind: dict[str, Any] = {"compare": compare, "row": row, "batch": batch, "seed": seed}
    worlds = [Heads(0.0, ranks=ranks, **kind) for ranks in ((0.07, 0.02, 0.01), (0.56, 0.16, 0.08))]
    controller, best, took = adaptive(worlds[0]), 0.0, 0.0
    for world in worlds * 3:
        tokens = 0
        while tokens < TOKENS * batch:
            record = world.round(controller, controller.choose(Load(batch)))
            controller.update(record)
            tokens, took = tokens + record.tokens, took + record.seconds
        best += tokens / world.best(NODES)
    return best / took


def test_easy_text_is_noticed_sooner_in_hindsight() -> None:
    """Law: where texts are hard and easy in turn, hindsight gains at least a percent."""
    without, with_it = (
        fmean(share_of_best(seed, compare=compare, batch=8, row=1e-4) for seed in range(SEEDS))
        for compare in (False, True)
    )
    assert with_it > 1.01 * without


def test_only_text_of_k_0_is_judged_in_hindsight() -> None:
    """Bug: after a baseline of one step, and in every step while a trace was recorded, nodes within
    the accepted tokens of a verified tree counted once more, as if a round had begun at each."""
    world = Trees(0.0, batch=4, row=1e-5)
    controller, traced, zeros = adaptive(world), adaptive(world), 0
    for _ in range(600):
        choice = controller.choose(Load(4))
        assert traced.choose(Load(4)) == choice
        assert not choice.uses_hindsight or zeros >= 2 * MOST_TREES
        record, zeros = world.round(controller, choice), 0 if choice.k else zeros + 1
        controller.update(record)
        more = choice.k > 0 and not choice.uses_hindsight
        traced.update(replace(record, hindsight=[Agreement(0, 0, [(0.0, True)], 1)] * 4 * more))
    assert controller.estimates().k > 4
