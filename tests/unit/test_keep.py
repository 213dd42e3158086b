"""Where AdaptiveK cuts proposals and stops drafting, against brute force and in simple cases."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engine.control.acceptance import ProposalModel
from engine.control.adaptive import AdaptiveK
from engine.control.controller import Load
from engine.control.cost_model import CostModel
from engine.control.goodput import Goodput
from engine.control.profile import Profile
from engine.scheduling.step_record import Outcome
from tests.support.controller_world import K_MAX, World, adaptive, play


def trained(batch: int, *, row: float = 4e-4, draft: float = 1e-4, rounds: int = 150) -> AdaptiveK:
    """Return a controller from a world with informative confidences."""
    world = World(alpha=0.6, batch=batch, row=row, draft=draft, informed=1.5)
    controller = adaptive(world, stops=True)
    play(controller, world, rounds)
    assert controller.choose(Load(batch)).k == K_MAX
    return controller


def value(controller: AdaptiveK, confidences: list[list[float]], lengths: list[int]) -> float:
    """Return the expected tokens of these lengths, less the cost of their rows in tokens."""
    alive = [controller._proposals.survival(sure) for sure in confidences]
    tokens = sum(sum(row[:n]) for row, n in zip(alive, lengths, strict=True))
    seconds, begin = controller._goodput.by_row, len(confidences)
    return tokens - controller._goodput.present * float(
        seconds[begin + sum(lengths)] - seconds[begin]
    )


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_kept_lengths_are_the_best(batch: int) -> None:
    """Law: at the controller's own goodput and costs, no other lengths are worth more."""
    controller, rng = trained(batch), random.Random(batch)
    distinct = set()
    for _ in range(12):
        most = [rng.randint(1, 3 if batch == 4 else K_MAX) for _ in range(batch)]
        confidences = [[rng.gauss(2.5, 1.5) for _ in range(n)] for n in most]
        kept = controller.kept_counts(confidences)
        assert all(0 <= n <= all_ for n, all_ in zip(kept, most, strict=True))
        every = itertools.product(*(range(n + 1) for n in most))
        best = max(value(controller, confidences, list(lengths)) for lengths in every)
        assert value(controller, confidences, kept) == pytest.approx(best, abs=1e-9)
        distinct.add(tuple(kept))
    assert len(distinct) > 2


def test_a_confident_token_is_kept_before_an_uncertain_one() -> None:
    """Law: rows go to the tokens that are likely to be right."""
    controller = trained(4, row=1e-3)
    sure, doubtful = controller.kept_counts([[6.0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4])[:2]
    assert sure > doubtful
    longer, shorter = controller.kept_counts([[6.0, 6.0, 6.0], [6.0, -1.0, 6.0], [6.0], [6.0]])[:2]
    assert longer > shorter == 1


def test_nothing_is_kept_where_rows_are_too_expensive() -> None:
    """Law: a whole proposal may be left out."""
    world = World(alpha=0.3, batch=4, row=2e-2, informed=0.0)
    controller = adaptive(world, stops=True)
    play(controller, world, 100)
    assert controller.kept_counts([[3.0] * 4] * 4) == [0] * 4
    assert controller.kept_counts([[3.0] * 4]) == [0]


def test_drafting_ends_at_the_bound_and_where_nothing_can_pay() -> None:
    controller = trained(2)
    assert controller.keeps_drafting([[6.0], [6.0]])
    assert not controller.keeps_drafting([[9.0] * K_MAX] * 2)
    controller.kept_counts([[6.0], [6.0]])
    assert not controller.keeps_drafting([[-9.0], [-9.0]])
    dear = World(alpha=0.6, batch=2, draft=0.5, informed=1.5)
    without = adaptive(dear, stops=True)
    play(without, dear, 40)
    assert not without.keeps_drafting([[9.0], [9.0]])


def test_a_confident_draft_goes_deeper() -> None:
    """Law: the draft depth follows the confidence, not acceptance alone."""
    controller = trained(1, draft=6e-4)
    depths = []
    for confidence in (0.0, 3.0, 7.0):
        depth = 1
        while controller.keeps_drafting([[confidence] * depth]):
            depth += 1
        controller.kept_counts([[confidence] * depth])
        depths.append(depth)
    assert depths == sorted(depths)
    assert depths[0] < depths[2] == K_MAX


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_useless_confidence_does_no_harm(alpha: float, batch: int, stops: bool) -> None:
    """Law: a confidence without information is soon ignored and costs nothing."""
    world = World(alpha=alpha, batch=batch, row=2e-4, free=8, informed=0.0)
    controller = adaptive(world, stops=stops)
    trace = play(controller, world, 800)
    assert controller._proposals.confidence_weight < 0.25
    assert trace.rate > 0.93 * world.best_rate


@pytest.mark.parametrize("batch", [1, 8])
def test_good_confidence_is_worth_tokens(batch: int) -> None:
    """Law: at equal average acceptance, informative confidences raise the rate."""
    rates = []
    for informed in (0.0, 2.5):
        world = World(alpha=0.6, batch=batch, row=4e-4, draft=2e-4, informed=informed)
        rates.append(play(adaptive(world, stops=True), world, 1500).rate)
    assert rates[1] > rates[0]


def test_probes_at_k_0_bring_speculation_back() -> None:
    """Law: at K = 0 there is a probe every 16 to 48 steps, mostly of a quarter of the sequences,
    and less often only while the last one is not paid off; hindsight in between brings speculation
    back within 100 steps."""
    world = World(alpha=0.03, batch=8, draft=8e-4, row=2e-4, informed=1.0)
    controller = adaptive(world, stops=True)
    play(controller, world, 200)
    experiments, at = list[tuple[str, int | None]](), []
    for index in range(500):
        choice = controller.choose(Load(world.batch))
        if choice.k:
            experiments.append((choice.reason, choice.max_speculating))
            assert controller.estimates().k == choice.k, "an experiment is told as it is played"
            at.append(index)
        controller.update(world.round(controller, choice))
    gaps: list[int] = np.diff(at).tolist()
    assert set(experiments) == {("probe", 2), ("trial", None)}
    trials = experiments.count(("trial", None)) / 3  # a trial has three steps
    assert experiments.count(("probe", 2)) > 2 * trials
    assert set(gaps) - {1}
    assert min(set(gaps) - {1}) >= 16
    world.alpha = 0.95
    trace = play(controller, world, 100)
    assert min(trace.depths[-3:]) > 1


def test_a_trial_is_drafted_and_verified_whole() -> None:
    """Law: a step with K > 0 runs to measure its cost, although no draft token in it is expected to
    be worth its row."""
    world = World(alpha=0.03, batch=8, draft=8e-4, row=2e-4, informed=1.0)
    controller = adaptive(world, stops=True)
    for _ in range(200):
        choice = controller.choose(Load(world.batch))
        if choice.reason == "trial":
            break
        controller.update(world.round(controller, choice))
    doubtful = [[-9.0]] * 8
    assert controller.keeps_drafting(doubtful)
    assert controller.kept_counts(doubtful) == [1] * 8
    controller.update(world.round(controller, choice))
    assert not controller.keeps_drafting(doubtful)
    assert controller.kept_counts(doubtful) == [0] * 8


def feared(target: float, draft: float) -> list[int]:
    """Return the final depths, without baselines, if the profile has these seconds for 64 rows and
    for a draft step."""
    world = World(alpha=0.9, batch=1, informed=1.0)
    controller = AdaptiveK(K_MAX)
    controller.costs.set_profile(
        Profile([(1, 4e-3), (64, target)], [(1, draft), (64, draft)], 2e-4)
    )
    play(controller, world, 400)
    trace = play(controller, world, 40)
    both = zip(trace.depths, trace.reasons, strict=True)
    depths = [depth for depth, reason in both if reason != "baseline"]  # those run at K = 0
    assert len(depths) > 30
    return depths


def test_an_overstated_cost_of_rows_is_found_out() -> None:
    """Law: a profile that overstates the cost of rows keeps K at 0 only for a while."""
    assert min(feared(target=1.0, draft=4e-4)) > 0


def test_an_overstated_cost_of_drafting_is_found_out() -> None:
    """Law: a profile that overstates the cost of drafting keeps K at 0 only for a while."""
    assert min(feared(target=1e-2, draft=2e-2)) > 0


def test_survival_is_a_chance_at_every_depth() -> None:
    """Bug: as each K cuts proposals differently, reported survival fell below 0 and rose again."""
    for row in (4e-4, 1e-3, 2e-3, 4e-3):
        for batch in (1, 8):
            world = World(alpha=0.6, batch=batch, row=row, draft=1e-4, informed=1.5)
            controller = adaptive(world, stops=True)
            for _ in range(25):
                play(controller, world, 10)
                found = controller.estimates().survival
                assert all(0 <= chance <= 1 for chance in found)
                assert found == sorted(found, reverse=True)


def test_survival_never_rises_with_depth() -> None:
    """Bug: data for depths that were not used lately was outdated, so `GET /speculation` reported
    eight tokens in a row as more likely to be accepted than seven."""
    guesses = ProposalModel(K_MAX)
    for _ in range(20):
        guesses.acceptance.update(2, [Outcome(0, 0, 0)] * 8)
    goodput = Goodput(K_MAX, guesses, CostModel())
    goodput.refresh(4, 0.0)
    assert goodput.survival == sorted(goodput.survival, reverse=True)
