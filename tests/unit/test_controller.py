"""The controllers in synthetic worlds with known acceptance, known costs and seeded noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import SpeculationConfig
from engine.control.adaptive import AdaptiveK
from engine.control.controller import Choice, FixedK, KController, Load
from engine.control.cost_model import CostModel
from engine.control.exploration import PROBE_FIRST, Exploration, Round
from engine.control.modes import build_controller
from engine.control.profile import CONTEXT, Profile
from engine.messages import Reason
from engine.scheduling.step_record import Agreement, Outcome, SequenceStep, StepRecord
from tests.support.controller_world import K_MAX, Trace, World, adaptive, play, step_of


def share(ks: Sequence[int], wanted: Callable[[int], bool]) -> float:
    return sum(map(wanted, ks)) / len(ks)


def test_a_fast_and_good_draft_gets_a_large_k() -> None:
    world = World(alpha=0.95)
    trace = play(adaptive(world), world, 400)
    assert share(trace.ks[50:], lambda k: k >= 6) > 0.95


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_cost_in_the_profile_is_found_out(seed: int) -> None:
    """Bug: a profile taken on a loaded machine overstated steps of more than two rows by half. By
    it K = 1 was best and was kept for good, since only costs of steps that run are corrected: 98
    tokens/s instead of 117."""
    world = World(0.66, base=1.4e-2, row=4e-4, draft=1.1e-3, informed=0.5, seed=seed)
    controller = AdaptiveK(K_MAX, stops=False)
    sizes = (1, 2, 3, 5, 9, 17)
    points = [(n, world.target(n) * (1.5 if n > 2 else 1.0)) for n in sizes]
    controller.costs.set_profile(Profile(points, [(1, world.draft)], world.host, {1: points}))
    play(controller, world, 400)
    assert play(controller, world, 400).rate > 0.93 * world.best_rate


def test_a_bad_draft_is_switched_off() -> None:
    """Law: a bad draft is used for exploration only, which costs about 1 %."""
    world = World(alpha=0.1, draft=1e-3)
    controller = adaptive(world)
    play(controller, world, 300)
    trace = play(controller, world, 1500)
    assert share(trace.ks, lambda k: k > 0) < 0.05
    assert trace.rate > 0.985 * world.rate(0)


def test_expensive_probes_are_rare() -> None:
    """Bug: where the drafter's catch-up took as long as four steps, probes still came every 48
    steps, and 8 % of the time was lost."""
    shares = []
    for draft in (2e-4, 2e-2):
        world = World(alpha=0.05, draft=draft)
        controller = adaptive(world)
        play(controller, world, 300)
        trace = play(controller, world, 3000)
        shares.append(share(trace.ks, lambda k: k > 0))
        assert trace.rate > 0.98 * world.rate(0)
    assert 0 < shares[1] < shares[0] / 4


class Counted(AdaptiveK):
    """Counts the decisions about steps with K > 0."""

    thoughts = 0

    def _while_on(self) -> tuple[int, Reason]:
        self.thoughts += 1
        return super()._while_on()


def test_under_load_even_a_good_draft_is_switched_off() -> None:
    """Law: at 48 sequences every row costs time, which acceptance alone does not show."""
    world = World(alpha=0.7, batch=48, free=1, row=4e-4)
    trace = play(adaptive(world), world, 400)
    assert share(trace.ks[50:], lambda k: k > 0) < 0.04
    assert trace.rate > 0.985 * world.rate(0)


def test_the_same_draft_is_used_after_the_load() -> None:
    loaded = World(alpha=0.7, batch=48, row=4e-4)
    controller = adaptive(loaded)
    play(controller, loaded, 200)
    alone = World(alpha=0.7, batch=1, row=4e-4)
    trace = play(controller, alone, 200)
    assert share(trace.ks[:], lambda k: k > 0) > 0.9


@pytest.mark.parametrize("batch", [1, 32])
def test_it_comes_back_from_zero_when_acceptance_recovers(batch: int) -> None:
    bad = World(alpha=0.05, batch=batch, draft=1e-3)
    controller = adaptive(bad)
    play(controller, bad, 800)
    good = World(alpha=0.9, batch=batch, draft=1e-3)
    play(controller, good, 600)
    trace = play(controller, good, 300)
    assert share(trace.ks, lambda k: k >= 2) > 0.9
    assert trace.rate > 0.95 * max(good.rate(k) for k in range(K_MAX + 1))


@pytest.mark.parametrize("alpha", [0.2, 0.45, 0.7, 0.9])
@pytest.mark.parametrize("batch", [1, 6, 32])
def test_k_settles(alpha: float, batch: int) -> None:
    """Law: in a constant world K changes rarely: 25 of 800 steps are baselines or probes, and each
    of them changes K twice."""
    world = World(alpha=alpha, batch=batch)
    trace = play(adaptive(world), world, 1000)
    assert Trace(ks=trace.ks[200:]).switches < 2 * 25 + 20


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.7, 0.92])
def test_it_is_within_a_few_percent_of_the_best_fixed_k(alpha: float, batch: int) -> None:
    """Law: learning and probing cost less than 6 % against the best fixed K, which only the world
    knows (14 other seeds: 0.6 % on average, at most 5.1 %)."""
    world = World(alpha=alpha, batch=batch, row=2e-4, free=8)
    trace = play(adaptive(world), world, 1000)
    assert trace.rate > 0.94 * world.best_rate


def wrongly_told(world: World, wrong_by: float, *, stops: bool) -> AdaptiveK:
    """Return a controller whose profile understates rows and drafting by this factor."""
    controller = AdaptiveK(K_MAX, stops=stops)
    row, draft = world.row / wrong_by, world.draft / wrong_by
    target = [(1, world.base), (64, world.base + 63 * row)]
    controller.costs.set_profile(Profile(target, [(1, draft), (64, draft)]))
    return controller


@pytest.mark.parametrize(
    ("informed", "stops", "wrong_by"), [(None, False, 2.0), (1.5, False, 3.0), (1.5, True, 3.0)]
)
def test_a_wrong_profile_is_corrected(informed: float | None, stops: bool, wrong_by: float) -> None:
    """Law: measured steps correct a profile in which rows and drafting are too cheap."""
    world = World(alpha=0.6, batch=4, draft=1.5e-3, row=8e-4, informed=informed)
    trace = play(wrongly_told(world, wrong_by, stops=stops), world, 800)
    assert trace.rate > 0.93 * world.best_rate


def test_without_a_profile_it_learns_from_the_clock() -> None:
    world = World(alpha=0.9)
    trace = play(AdaptiveK(K_MAX, stops=False), world, 800)
    assert trace.rate > 0.93 * world.best_rate


@pytest.mark.parametrize("proposal_rate", [0.05, 0.3])
def test_a_rare_proposer_is_judged_by_its_proposals(proposal_rate: float) -> None:
    """Law: n-gram look-up that rarely proposes, but is then right, costs little: K stays up."""
    world = World(alpha=0.9, draft=1e-6, proposal_rate=proposal_rate)
    trace = play(adaptive(world), world, 1500)
    assert share(trace.ks[100:], lambda k: k >= 5) > 0.9
    assert trace.rate > 0.93 * world.best_rate


def test_baselines_are_rare_where_look_ups_serve() -> None:
    """Law: baselines take about a hundredth of the time at most. Bug: without look-ups, which gave
    four times the tokens, five of each 133 steps lost 2.5 % of it."""
    for alpha, batch in ((0.4, 4), (0.45, 4), (0.45, 8)):
        world = World(alpha=alpha, batch=batch)
        controller, records = adaptive(world), list[tuple[bool, StepRecord]]()
        for _ in range(3000):
            choice = controller.choose(Load(batch))
            seen = world.round(controller, choice)
            if not (baseline := choice.reason == "baseline"):
                seen = replace(seen, parts=[replace(p, tokens=4 * p.tokens) for p in seen.parts])
            controller.update(seen)
            records.append((baseline, seen))
        usual = [seen for baseline, seen in records if not baseline]
        rate = sum(seen.tokens for seen in usual) / sum(seen.seconds for seen in usual)
        lost = sum(seen.seconds - seen.tokens / rate for baseline, seen in records if baseline)
        assert 0.0 < lost < 0.012 * sum(seen.seconds for _, seen in records)


@pytest.mark.parametrize("cold", [0.0, 0.07])
def test_proposing_nothing_has_a_cost(cold: float) -> None:
    """Bug: an n-gram that found a token in one step of twelve kept K above 0, since steps in which
    it found nothing, 7 % slower than those at K = 0, counted as steps at K = 0. Law: it stays where
    such steps are as fast."""
    found = list[float]()
    for seed in range(4):
        world = World(alpha=0.5, proposal_rate=0.05 if cold else 0.08, draft=1e-5, base=5e-3,
            row=2e-4, host=3e-4, cold=cold, seed=seed)  # fmt: skip
        controller = AdaptiveK(K_MAX, stops=False)
        world.profile(controller)
        controller.costs.has_draft = False
        play(controller, world, 600)
        trace = play(controller, world, 2000)
        found.append(sum(k > 0 for k in trace.ks) / len(trace.ks))
    assert max(found) < 0.25 if cold else min(found) > 0.75


def test_rows_count_only_with_a_proposal() -> None:
    """Law: expensive rows do not lower K if the drafter proposes in one step of ten only."""
    world = World(alpha=0.8, row=1e-3, draft=1e-6, proposal_rate=0.1)
    trace = play(adaptive(world), world, 600)
    assert share(trace.ks[100:], lambda k: k > 0) > 0.9


def test_a_probe_of_a_draft_model_asks_few_sequences() -> None:
    """Law: a probe asks four of 64 sequences, since each must catch up first and four tell enough.
    The other sixty do not count as sequences without a proposal."""
    world = World(alpha=0.0, batch=64, row=4e-4)
    controller = adaptive(world)
    limits = set()
    for _ in range(400):
        choice = controller.choose(Load(64))
        limits.add((choice.k > 0, choice.max_speculating))
        controller.update(world.round(controller, choice))
    assert (True, 4) in limits
    assert (False, None) in limits


def test_a_probe_without_catch_up_asks_all_sequences() -> None:
    """Law: without a draft model there is no catch-up, so a probe asks all sequences."""
    world = World(alpha=0.0, batch=64, row=4e-4)
    controller = AdaptiveK(K_MAX, stops=False)
    controller.costs.set_profile(Profile([(1, 1e-3), (64, 3e-2)], host=1e-4))
    for _ in range(400):
        choice = controller.choose(Load(64))
        assert choice.max_speculating is None
        controller.update(world.round(controller, choice))


def test_short_proposals_are_no_evidence_against_depth() -> None:
    """Law: draft tokens that were never proposed do not count as rejected (censoring)."""
    controller = AdaptiveK(4, stops=False)
    for _ in range(100):
        seen = step_of([Outcome(2, 2, 2)], 1e-4, 1e-3, 1e-4)
        controller.update(replace(seen, parts=[replace(seen.parts[0], k=4)]))
    assert controller.estimates().acceptance > 0.95


def test_a_few_prefill_rows_cost_what_other_rows_do() -> None:
    """Bug: with short requests nearly every step of a large batch has a few prefill rows, and its
    forward time was never learnt: K = 6 of JSON seemed no better than K = 3. Host and drafter times
    of such steps are not learnt, since a prefill row costs them something else."""
    world = World(alpha=0.8, batch=16)
    controller = adaptive(world)
    drafting = controller.costs.drafting(16)
    before = controller.costs.by_rows(16, 64)
    outcomes = [Outcome(3, 3, 3)] * 16
    for _ in range(50):
        controller.choose(Load(16))
        controller.update(step_of(outcomes, 9.0, 9.0, prompt_rows=6))
    after = controller.costs.by_rows(16, 64)
    assert after[64] > 100 * before[64]
    begin, step = controller.costs.drafting(16)
    slow = math.exp(controller.costs._target.machine)
    assert (begin / slow, step / slow) == pytest.approx(drafting)


def test_prompt_steps_do_not_train_the_costs() -> None:
    """Law: the time of a step with many prefill rows tells nothing about a decode step."""
    world = World(alpha=0.8)
    controller = adaptive(world)
    play(controller, world, 100)
    before = controller.costs.by_rows(1, 9).tolist()
    for _ in range(50):
        controller.update(step_of([Outcome(0, 0, 0)], 0.0, 9.0, 9.0, prompt_rows=511))
    assert controller.costs.by_rows(1, 9).tolist() == before


def test_one_slow_step_does_not_change_k() -> None:
    """Law: a single step that takes ten times as long is clipped."""
    world = World(alpha=0.8)
    controller = adaptive(world)
    k = play(controller, world, 300).ks[-1]
    seen = world.round(controller, Choice(k))
    controller.update(replace(seen, draft_seconds=4e-3, target_seconds=4e-2, host_seconds=2e-3))
    assert abs(controller.choose(Load(1)).k - k) <= 1


def test_estimates_give_the_speed_up() -> None:
    world = World(alpha=0.9)
    controller = adaptive(world)
    trace = play(controller, world, 500)
    estimates = controller.estimates()
    assert estimates.acceptance == pytest.approx(0.9, abs=0.05)
    assert estimates.speedup == pytest.approx(trace.rate / world.rate(0), rel=0.15)


def test_fixed_k_ignores_its_results() -> None:
    controller = FixedK(3)
    world = World(alpha=0.0, batch=64)
    assert set(play(controller, world, 20).ks) == {3}


@pytest.mark.parametrize(
    ("config", "name", "k_max"),
    [
        ({"controller": {"k": 3}}, "fixed", 3),
        ({"controller": {"k_max": 5}}, "adaptive", 5),
        ({"controller": {"k_max": 0}}, "fixed", 0),
        ({"proposer": {"kind": "none"}}, "fixed", 0),
    ],
)
def test_the_config_chooses_the_controller(
    config: dict[str, dict[str, object]], name: str, k_max: int
) -> None:
    controller = build_controller(SpeculationConfig.model_validate(config))
    assert (controller.name, controller.k_max) == (name, k_max)
    assert 0 <= controller.choose(Load(1)).k <= k_max


def test_a_controller_for_k_0_alone_is_refused() -> None:
    """Bug: a controller for K = 0 alone ran until its first hindsight, then failed over array
    shapes."""
    with pytest.raises(ValueError, match="nothing to choose up to K = 0"):
        AdaptiveK(0)


def test_free_proposals_are_as_long_as_they_pay() -> None:
    """Law: if rows cost time and proposals do not, likely tokens are used up to the bound on K,
    less likely ones until a row costs more than it gains, and hopeless ones not at all."""
    controller = adaptive(World(alpha=0.5, row=8e-4))
    choice = controller.choose(Load(1))
    lengths = [
        choice.free_count([alpha**j for j in range(1, K_MAX + 5)])[0] for alpha in (0.99, 0.6, 0.05)
    ]
    assert lengths[0] == K_MAX
    assert 0 < lengths[1] < K_MAX
    assert lengths[2] == 0
    assert choice.free_count([]) == (0, 0.0)


def test_free_proposals_give_way_to_a_better_draft() -> None:
    """Law: a look-up that is rarely right does not replace drafting with a good draft."""
    controller = adaptive(World(alpha=0.9))
    play(controller, World(alpha=0.9), 100)
    choice = controller.choose(Load(1))
    poor, good = [0.4, 0.2], [0.99**j for j in range(1, K_MAX + 1)]
    (few, little), (many, much) = choice.free_count(poor), choice.free_count(good)
    assert 0 < few < many == K_MAX
    assert little < choice.drafting[1] < much


def test_draft_tokens_cost_more_in_a_large_batch() -> None:
    """Law: a row costs what the whole batch loses by a longer step."""
    world = World(alpha=0.5, row=8e-4)
    controller = adaptive(world)
    lengths = []
    for sequences in (1, 64):
        choice = controller.choose(Load(sequences))
        lengths.append(choice.free_count([0.7**j for j in range(1, 9)])[0])
    assert lengths[0] > lengths[1]


def test_there_are_no_rates_before_the_first_step() -> None:
    """Bug: GET /speculation returned the priors on a server that had not served any request."""
    controller = adaptive(World(alpha=0.9))
    estimates = controller.estimates()
    assert (estimates.rates, estimates.survival, estimates.num_sequences) == ([], [], 0)
    controller.choose(Load(1))
    assert controller.estimates().rates


def test_one_drafting_sequence_in_a_growing_batch() -> None:
    """Bug: costs by row were known up to the batch of the last choice. Prefills let the batch grow
    within the same power of two without drafting, and the engine died of an IndexError."""
    world = World(alpha=0.9, batch=8, informed=1.0)
    controller = adaptive(world)
    play(controller, world, 40)
    for sequences in range(8, 16):
        controller.choose(Load(sequences))
        assert 0 <= controller.kept_counts([[5.0] * K_MAX])[0] <= K_MAX


def test_k_0_ends_with_the_load_that_needed_it() -> None:
    """Bug: after a large batch had ended, K stayed at 0 for fourteen more steps."""
    crowd = World(alpha=0.7, batch=48, free=1, row=4e-4)
    controller = adaptive(crowd)
    play(controller, crowd, 203)
    alone = World(alpha=0.7, row=4e-4)
    assert min(play(controller, alone, 5).ks) > 0


def test_an_alternating_batch_size_adds_no_probes() -> None:
    """Bug: fifteen steps of waiting were credited at their start, though each change of the batch
    cut them short, so a fifth of all steps were probes or trials."""
    worlds = [World(alpha=0.0, batch=batch, row=4e-4, draft=1e-3) for batch in (20, 21)]
    controller, probes = adaptive(worlds[0]), 0
    for index in range(2000):
        world = worlds[index % 2]
        choice = controller.choose(Load(world.batch))
        probes += choice.k > 0
        controller.update(world.round(controller, choice))
    assert 0 < probes < 100


def test_the_debt_of_a_trial_does_not_stop_probing() -> None:
    """Bug: the debt of a trial, in which the drafter of a large batch caught up, stopped probing
    for about 500 steps, so an improved acceptance went unnoticed."""
    exploration = Exploration()
    rounds = [exploration.while_off(1.0, alone=False) for _ in range(PROBE_FIRST)]
    assert rounds[-1] == "trial"
    for _ in range(3):
        exploration.end(asked=True, lost=3.0, usual=1.0)
        exploration.while_off(1.0, alone=False)
    seen = []
    for _ in range(200):
        seen.append(exploration.while_off(1.0, alone=False))
        exploration.end(asked=seen[-1] == "probe", lost=0.2, usual=1.0)
    assert "trial" not in seen
    assert seen.count("probe") >= 3


def test_probes_are_fewer_where_little_can_be_gained() -> None:
    """Law: probes follow the gain they can find: about half as many if perfect acceptance gained
    only 50 %, but still some if no K could pay, since costs may be wrong."""
    probes = {}
    for most_gain in (4.0, 1.0, 0.5, 0.0, -0.5):
        exploration = Exploration()
        found = []
        for _ in range(20_000):
            found.append(exploration.while_off(1.0, alone=False, most=most_gain))
            exploration.end(asked=found[-1] != "usual", lost=1.0, usual=1.0)
        probes[most_gain] = found.count("probe")
    assert probes[4.0] == probes[1.0]
    assert 0.4 < probes[0.5] / probes[1.0] < 0.8
    assert 0 < probes[0.0] < 0.3 * probes[1.0]
    assert probes[-0.5] == probes[0.0]


def test_a_k_without_gain_is_switched_off() -> None:
    """Bug: K = 1 with nearly all draft tokens left out is 1.7 % slower than K = 0, which was too
    little to switch off: a large batch drafted in vain for hundreds of steps (in one run of ten, at
    0.93 to 0.96 of the rate of K = 0)."""
    for seed in range(1, 13):
        world = World(alpha=0.7, batch=48, free=1, row=4e-4, seed=seed)
        trace = play(adaptive(world), world, 400)
        assert trace.rate > 0.98 * world.rate(0), seed


def test_baselines_are_more_frequent_where_k_0_is_close() -> None:
    """Bug: when K = 0 became a third faster, this went unnoticed for 256 steps."""
    rounds = {}
    for close, gain in ((True, 0.05), (False, 0.5)):
        exploration = Exploration()
        played = []
        for _ in range(1000):
            played.append(exploration.while_on(1.0, gain=gain))
            exploration.end(asked=True, lost=0.05 * (played[-1] == "baseline"), usual=1.0)
        rounds[close] = [i for i, r in enumerate(played) if r == "baseline" != played[i - 1]]
    assert max(b - a for a, b in zip(rounds[True], rounds[True][1:], strict=False)) < 160
    assert len(rounds[False]) < len(rounds[True])


@dataclass
class Cheaper(World):
    """Steps at K = 0 take `saved` seconds less than the profile said."""

    saved: float = 0.0

    def target(self, rows: int) -> float:
        return super().target(rows) - (self.saved if rows <= self.batch else 0.0)


def test_a_change_of_acceptance_measures_k_0_again() -> None:
    """Bug: after a long gain, baselines were 512 steps apart. When acceptance fell, the cost of
    K = 0 decided, but was as old as that: eight requests ran at 0.9 of the rate of K = 0. And the
    next choice came up to 64 steps after the baseline."""
    for seed in range(1, 7):
        world = Cheaper(0.9, 8, base=1e-3, row=3e-5, draft=2.5e-4, seed=seed)
        controller = AdaptiveK(K_MAX, stops=False)
        world.profile(controller)
        assert share(play(controller, world, 1200).ks[100:], lambda k: k > 0) > 0.95
        world.alpha, world.saved = 0.5, 3e-4
        assert share(play(controller, world, 250).ks, lambda k: k > 0) < 0.25, seed


class Crowd(World):
    """Of many sequences one has a free proposal in each step, and the caches settle slowly: the
    first steps at K = 0 take 1.4 times as long as later ones."""

    plain = 0

    def round(self, controller: KController, choice: Choice) -> StepRecord:
        seen = super().round(controller, choice)
        self.plain = 0 if choice.k else self.plain + 1
        if choice.k:
            return seen
        looked_up = replace(seen.parts[0], source="ngram", drafted=1, proposed=1)
        slower = 1.4 if self.plain <= 4 else 1.0
        parts = [looked_up, *seen.parts[1:]]
        return replace(seen, parts=parts, target_seconds=slower * seen.target_seconds)


def test_baselines_beside_free_proposals_wait_for_the_caches() -> None:
    """Bug: a step at K = 0 in which one of 32 sequences had a free proposal or prompt rows never
    counted as unsettled. So baselines found K = 0 slow, and K stayed at 1 or 2 for hundreds of
    steps, at 0.8 of the rate of K = 0."""
    for seed in range(1, 5):
        world = Crowd(0.9, 32, base=2e-3, row=4e-5, draft=3e-4, host=1e-3, seed=seed)
        controller = AdaptiveK(K_MAX, stops=False)
        world.profile(controller)
        play(controller, world, 300)
        world.alpha = 0.33
        assert share(play(controller, world, 1000).ks, lambda k: k > 0) < 0.2, seed


def test_time_saved_pays_for_exploration() -> None:
    """Bug: a batch that had gained for a hundred steps, and then did not, was still paying off its
    first trial, and explored again only after its replies had ended."""
    waits = []
    for gain in (0.0, 0.2):
        exploration = Exploration()
        exploration.round = "trial"
        exploration.end(asked=True, lost=5.0, usual=1.0)
        for _ in range(100):
            exploration.while_on(1.0, gain=gain)
            exploration.end(asked=False, lost=0.0, usual=1.0)
        exploration.switched(back=False)
        found = [exploration.while_off(1.0, alone=True) for _ in range(1000)]
        waits.append(found.index("trial"))
    assert waits[1] < PROBE_FIRST * 3 < waits[0]


def test_gain_at_one_batch_size_does_not_pay_for_trials_at_another() -> None:
    """Bug: bursts of sixteen requests between single ones, where speculation paid, began with a
    trial each, since the time saved had paid off the one before: bursts were 5 % slower."""
    exploration = Exploration()
    exploration.restart(5)
    exploration.round = "trial"
    exploration.end(asked=True, lost=8.0, usual=1.0)
    exploration.restart(1)
    for _ in range(2000):
        exploration.while_on(0.5, gain=0.4)
        exploration.end(asked=False, lost=0.0, usual=0.5)
    exploration.restart(5)
    assert "trial" not in [exploration.while_off(1.0, alone=False) for _ in range(100)]


def test_short_bursts_lose_little() -> None:
    """Law: bursts of sixteen requests, in which no K pays, between single ones lose at most 1.5 %.
    Bug: each change of the batch size was handled as if the new size had never been seen, and the
    time of all sizes paid for exploration in bursts, which lost 3 %."""
    seconds, tokens, best = 0.0, 0, 0.0
    for seed in (1, 2, 3):
        alone, crowd = (
            World(
                0.6, batch, proposal_rate=0.5, base=6e-4, row=2e-4, draft=2e-4, host=1e-4, seed=seed
            )
            for batch in (1, 16)
        )
        controller, best = AdaptiveK(K_MAX), crowd.rate(0)
        alone.profile(controller, wrong_by=1.0)
        for burst in range(40):
            play(controller, alone, 250)
            trace = play(controller, crowd, 50)
            if burst > 3:
                seconds, tokens = seconds + trace.seconds, tokens + trace.tokens
    assert tokens / seconds > 0.985 * best


def test_the_debt_of_a_large_batch_does_not_stop_one_stream() -> None:
    """Bug: one stream paid off a large batch's debt, counted in seconds, for 25,000 steps."""
    crowd = World(alpha=0.0, batch=32, row=4e-4, draft=5e-2)
    controller = adaptive(crowd)
    play(controller, crowd, 400)
    alone = World(alpha=0.0, base=1e-3, draft=2e-4)
    assert any(play(controller, alone, 3000).ks[100:])


@dataclass
class Padded(World):
    """Graphs are captured for multiples of `pad` rows: a forward is padded to the next one."""

    pad: int = 16

    def target(self, rows: int) -> float:
        return super().target(-(-rows // self.pad) * self.pad)


def test_a_draft_step_is_priced_by_the_rows_that_it_adds() -> None:
    """Bug: a draft step's rows were priced at the mean of all rows up to the largest K. Where the
    first rows are free and later ones are not, drafting stopped after one step, though the second
    only filled a padded forward."""
    world = Padded(alpha=0.75, batch=16, row=4e-4, free=48, informed=0.0)
    assert max(range(K_MAX + 1), key=world.rate) == 2
    controller = AdaptiveK(K_MAX)
    target = [(rows, world.target(rows)) for rows in range(16, 16 * (K_MAX + 2), 16)]
    controller.costs.set_profile(Profile(target, [(16, world.draft)], world.host))
    play(controller, world, 20)
    trace = play(controller, world, 400)
    assert share(trace.depths, lambda depth: depth == 2) > 0.9
    assert trace.rate > 0.98 * world.rate(2)


@dataclass
class Restless(World):
    """Machine speed jumps, for all parts of a step alike; the world's own clock ignores it."""

    slowness: float = 1.0

    def round(self, controller: KController, choice: Choice) -> StepRecord:
        seen = super().round(controller, choice)
        if self.random.random() < 1 / 30:
            self.slowness = self.random.choice([1.0, 1.2, 1.5, 1.8])
        slow = self.slowness
        return replace(
            seen,
            draft_seconds=slow * seen.draft_seconds,
            target_seconds=slow * seen.target_seconds,
            host_seconds=slow * seen.host_seconds,
        )


def test_jumps_of_machine_speed_do_not_favour_a_losing_k() -> None:
    """Law: a slowdown that all sizes share is not attributed to one size, though K = 0 and K > 0
    are measured at different times."""
    world = Restless(alpha=0.45, base=1.2e-3, row=4e-4, draft=5e-4, host=1e-4, informed=1.0)
    assert world.rate(1) < 0.9 * world.rate(0)
    trace = play(adaptive(world), world, 2000)
    assert share(trace.ks[200:], lambda k: k > 0) < 0.06


def test_noisy_timings_do_not_favour_k_0() -> None:
    """Bug: right after steps at K > 0 only times below the prediction were learnt, so where single
    steps vary by a quarter, as on shared machines, K = 0 looked ever faster than it was: it was
    chosen in a third of the steps, though K = 3 made 1.3 times its tokens per second."""
    on = []
    for seed in range(1, 9):
        world = World(alpha=0.5, draft=6e-4, noise=0.25, informed=1.0, seed=seed)
        assert world.best_rate > 1.3 * world.rate(0)
        on.append(share(play(adaptive(world), world, 2000).ks[200:], lambda k: k > 0))
    assert sum(on) / len(on) > 0.9


def test_a_wrong_first_choice_ends_soon_at_short_steps() -> None:
    """Bug: of steps that take a millisecond only one in thirty was learnt from, and choices were as
    rare. A proposer without draft timings in the profile, and slower than a forward, was used for a
    hundred steps."""
    for seed in range(1, 9):
        world = World(alpha=0.3, base=6e-4, row=2e-5, draft=1e-3, host=1e-4, seed=seed)
        controller = AdaptiveK(K_MAX, stops=False)
        controller.costs.set_profile(
            Profile([(n, world.target(n)) for n in (1, 2, 5, 9)], [], world.host)
        )
        trace = play(controller, world, 200)
        assert share(trace.ks, lambda k: k > 0) < 0.2, seed


def test_most_steps_at_k_0_are_skipped() -> None:
    """Bug: at 0.8 ms per step, choosing and learning at K = 0 made steps 6 % slower although there
    was nothing to learn. Skipped steps still count, and a new load is handled at once."""
    world = World(alpha=0.05, draft=2e-3)
    controller = adaptive(world)
    counts, inner = list[int](), controller._explore.while_off

    def while_off(seconds: float, **options: Any) -> Round:
        counts.append(options["rounds"])
        return inner(seconds, **options)

    controller._explore.while_off = while_off  # type: ignore[method-assign]
    play(controller, world, 300)
    counts.clear()
    ks = play(controller, world, 4000).ks
    assert sum(counts) == pytest.approx(len(ks), abs=8)
    assert len(counts) < len(ks) / 4
    assert 0 < share(ks, lambda k: k > 0) < 0.05
    crowd = World(alpha=0.95, batch=8, row=1e-5)
    assert share(play(controller, crowd, 300).ks[100:], lambda k: k > 0) > 0.8


@pytest.mark.parametrize(("milliseconds", "least", "most"), [(1.0, 0.01, 0.15), (80.0, 0.95, 1.0)])
def test_learning_takes_a_small_share_of_short_steps(
    milliseconds: float, least: float, most: float
) -> None:
    """Law: costs are learnt from a few of many steps of a millisecond, and from every long step."""
    scale = milliseconds * 1e-3
    world = World(0.8, base=scale, row=scale / 50, draft=scale / 20, host=scale / 20)
    controller = AdaptiveK(K_MAX, stops=False, costs=(costs := CountedCosts()))
    world.profile(controller)
    play(controller, world, 500)
    costs.learnt = 0
    play(controller, world, 2000)
    assert least < costs.learnt / 2000 <= most


class CountedCosts(CostModel):
    learnt = 0

    def learn(self, seen: StepRecord, *, caught_up: bool, settled: bool = True) -> None:
        self.learnt += 1
        super().learn(seen, caught_up=caught_up, settled=settled)


@pytest.mark.parametrize(("row", "trims"), [(1e-6, False), (1e-3, True)])
def test_tokens_are_left_out_only_where_rows_cost_something(row: float, trims: bool) -> None:
    """Law: unlikely tokens of a chain drafted in one call are left out of the forward where rows
    are dear; where they cost next to nothing, choosing them would take longer than it saves."""
    world = World(0.6, informed=1.5, row=row, draft=1e-5)
    controller = AdaptiveK(K_MAX, stops=False)
    world.profile(controller)
    play(controller, world, 600)
    kept = [kept < drafted for kept, drafted in lengths(controller, world, 300)]
    assert any(kept) == trims


def lengths(controller: AdaptiveK, world: World, rounds: int) -> list[tuple[int, int]]:
    """Return the numbers of tokens verified and drafted, of usual steps at K > 0."""
    found = list[tuple[int, int]]()
    for _ in range(rounds):
        choice = controller.choose(Load(num_sequences=world.batch))
        seen = world.round(controller, choice)
        controller.update(seen)
        if choice.reason == "pays":
            found += [(part.proposed, part.drafted) for part in seen.parts]
    assert found
    return found


def test_drafting_is_priced_by_steps_without_hindsight() -> None:
    """Bug: hindsight takes drafter time. Drafting was priced by the steps with hindsight alone, and
    looked a quarter too slow for a large batch. Bug: if a trace judges every step, no step gave the
    cost of drafting."""
    for agreements in ([Agreement(0, 0, [(1.0, True)])], []):
        controller = AdaptiveK(4, stops=False)
        controller.costs.set_profile(Profile([(1, 4e-3), (64, 5e-3)], [(1, 1e-4), (64, 1e-4)]))
        looked = 0
        for _ in range(80):
            choice = controller.choose(Load(16))
            k, looked = choice.k, looked + choice.uses_hindsight
            took = 5e-3 if choice.uses_hindsight else 2e-3
            part = SequenceStep(
                0, 0, 0, k=k, drafted=k, proposed=k, accepted=k, tokens=k + 1, tried=k, right=k
            )
            seen = StepRecord([part] * 16, "pays", took, 4e-3, hindsight=agreements)
            controller.update(seen)
        begin, step = controller.costs.drafting(16)
        assert looked > 0
        assert 1.5e-3 < begin + 4 * step < 2.5e-3


@pytest.mark.parametrize("batch", [1, 6])
def test_plain_seconds_are_known_while_speculation_pays(batch: int) -> None:
    """Law: `plain_seconds` follows from the costs behind the choice of K, for any number of
    sequences; it is 0 before the first choice; and asking for it does not change the choice."""
    world = World(alpha=0.9, batch=batch)
    controller = adaptive(world)
    assert controller.costs.plain_seconds(batch, 100) == 0.0
    trace = play(controller, world, 400)
    assert share(trace.ks[50:], lambda k: k > 0) > 0.9
    taken = world.host + world.target(batch)
    assert controller.costs.plain_seconds(batch, 100) == pytest.approx(taken, rel=0.1)
    assert FixedK(4).costs.plain_seconds(batch, 100) == 0.0


@pytest.mark.parametrize("chosen", [16, 24, 31])
def test_plain_seconds_for_any_number_of_sequences(chosen: int) -> None:
    """Bug: after a choice for 16 sequences, `plain_seconds` for 31 was that of 31 rows of 16
    sequences, a third too low; after one for 31, that for 16 was half too high."""

    def taken(sequences: int, rows: int) -> float:
        return 1e-3 + 5e-5 * rows + 2e-4 * sequences

    def measured(sequences: int) -> list[tuple[int, float]]:
        lengths = (1, 2, 3, 5, 9)
        return [(sequences * n, taken(sequences, sequences * n)) for n in lengths]

    controller = AdaptiveK(K_MAX, stops=False)
    batches = {n: measured(n) for n in (1, 4, 16, 64)}
    controller.costs.set_profile(Profile(batches[1], [(1, 1e-4)], 1e-4, batches))
    controller.choose(Load(chosen))
    for n in (12, 16, 17, 31, 32):
        assert controller.costs.plain_seconds(n, n * CONTEXT) == pytest.approx(1e-4 + taken(n, n))


def test_plain_seconds_grow_with_the_contexts() -> None:
    """Law: by the measured cost per context token, beyond the context of the last choice."""
    world = World(alpha=0.9)
    controller = AdaptiveK(K_MAX, stops=False)
    sizes = (1, 2, 3, 5, 9, 16)
    points = [(n, world.target(n)) for n in sizes]
    draft = [(1, world.draft)]
    controller.costs.set_profile(Profile(points, draft, world.host, token_seconds={4: (1e-6, 0.0)}))
    play(controller, world, 100)
    short, long = controller.costs.plain_seconds(1, 300), controller.costs.plain_seconds(1, 1300)
    assert long - short == pytest.approx(1e-3)
    assert controller.costs.plain_seconds(1, 0) > 0.0
