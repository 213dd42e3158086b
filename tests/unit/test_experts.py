"""Mixtures of experts: the weights that verification reads grow with rows, then saturate."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, mode

import numpy as np
import pytest

from engine.control.adaptive import AdaptiveK
from engine.control.cost_model import CostModel
from engine.control.profile import BATCHES, ROWS_OF_ONE, Points, Profile, row_counts, times_four
from engine.lab.plan.shape import Experts
from tests.support.controller_world import K_MAX, World, play

MIXTURES = [Experts(8, 2, 1), Experts(128, 8, 1), Experts(256, 8, 1)]  # Mixtral, Qwen3, DeepSeek


@dataclass
class Mixture(World):
    """A target of `experts`; `dense`: the fraction of a forward that is not experts."""

    experts: Experts = MIXTURES[1]
    dense: float = 0.15

    def target(self, rows: int) -> float:
        read = self.experts.touched(rows) / self.experts.per_token
        return self.base * (self.dense + (1 - self.dense) * read)

    def points(self, sequences: int, rows: tuple[int, ...]) -> Points:
        return [(sequences * n, self.target(sequences * n)) for n in rows]

    def measured(self, *, all_batches: bool = True) -> Profile:
        """Return a profile like `engine.step.profiling`'s. Unless `all_batches`, as where forwards
        are slow: one sequence with several rows, and larger batches with one row per sequence."""
        single, most = self.points(1, row_counts(ROWS_OF_ONE, K_MAX)), times_four(16, 64)
        plain = [(n, self.target(n)) for n in most]
        several = {n: self.points(n, row_counts(each, K_MAX)) for n, each in BATCHES}
        return Profile(
            [*single, *plain],
            [(n, self.draft) for n in (1, 4, 16, 64)],
            self.host,
            {1: single} | (several if all_batches else {n: [(n, s)] for n, s in plain}),
        )


def _worst(world: Mixture, profile: Profile, batches: range) -> float:
    """Return the largest relative error of the predictions, over batches and K."""
    costs, found = CostModel(), 0.0
    costs.set_profile(profile)
    for batch in batches:
        rows = batch * np.arange(1, K_MAX + 2)
        known = np.array([world.target(n) + world.host for n in rows.tolist()])
        found = max(found, float(abs(costs.by_rows(batch, rows[-1])[rows] / known - 1).max()))
    return found


@pytest.mark.parametrize("experts", MIXTURES, ids=lambda each: f"{each.per_token} of {each.count}")
def test_the_profile_has_the_shape_of_experts(experts: Experts) -> None:
    """Law: within 9 % for every batch up to 64 and every K. Bug: for two sequences with K = 8 the
    error was 13 %, as their cost was the mean of those of one and four."""
    world = Mixture(0.8, experts=experts)
    assert _worst(world, world.measured(), range(1, 65)) < 0.09
    assert _worst(world, world.measured(), range(1, 5)) < 0.06


def test_large_batches_show_where_the_curve_bends() -> None:
    """Bug: on a slow machine, large batches were extrapolated from one sequence's rows, as if there
    were ever more experts to read: twenty times too much."""
    world = Mixture(0.8, experts=MIXTURES[0])
    assert _worst(world, world.measured(all_batches=False), range(1, 65)) < 0.15


def _settled(world: World) -> list[int]:
    """Return the Ks of the last 300 of 600 steps; the rate must be close to that of the best K."""
    controller = AdaptiveK(K_MAX, stops=False)
    if isinstance(world, Mixture):
        controller.costs.set_profile(world.measured())
    else:
        world.profile(controller)
    trace = play(controller, world, 600)
    assert trace.rate > 0.96 * world.best_rate
    return trace.ks[300:]


@pytest.mark.parametrize("experts", MIXTURES, ids=lambda each: f"{each.per_token} of {each.count}")
def test_k_falls_where_experts_make_verification_slow(experts: Experts) -> None:
    """Law: with the same draft and acceptance, K is smaller than for a dense target, and the rate
    is close to that of the best K. The Ks are those of docs/speculation.md."""
    dense, mixture = _settled(World(0.7, row=4e-5)), _settled(Mixture(0.7, experts=experts))
    assert mean(mixture) < 1 < 3 < mean(dense)
    assert (mode(dense), mode(mixture)) == (4, 0)


@pytest.mark.parametrize(("experts", "most"), [*zip(MIXTURES, (6, 8, 8), strict=True)])
def test_a_large_batch_reads_all_experts_anyway(experts: Experts, most: int) -> None:
    """Law: where plain decoding reads all experts, draft tokens read no more, and K rises again, to
    `most`; that of a dense target falls. The Ks are those of docs/speculation.md."""
    few, many = (_settled(Mixture(0.7, batch, experts=experts)) for batch in (1, 32))
    assert mean(many) > mean(few) + 1
    assert (mode(many), mode(_settled(World(0.7, 32, row=4e-5)))) == (most, 2)
