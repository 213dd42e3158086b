"""Modes: which controller decides, and that the configured one keeps learning meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.control.acceptance import Confidences
from engine.control.adaptive import AdaptiveK
from engine.control.controller import Choice, FixedK, Load
from engine.control.modes import Modes
from engine.errors import ConfigError
from engine.messages import Mode
from engine.scheduling.step_record import Agreement, StepRecord
from tests.support.controller_world import K_MAX, World, play


def modes(world: World) -> Modes:
    controller = Modes(AdaptiveK(K_MAX, stops=False))
    world.profile(controller)
    return controller


def test_auto_is_the_configured_controller() -> None:
    """Law: until the operator sets a mode, the wrapper changes nothing."""
    alone = AdaptiveK(K_MAX, stops=False)
    World(alpha=0.8).profile(alone)
    trace = play(modes(World(alpha=0.8)), World(alpha=0.8), 300)
    assert trace.ks == play(alone, World(alpha=0.8), 300).ks


@pytest.mark.parametrize(("mode", "k", "played"), [("off", 0, 0), ("fixed", 3, 3), ("fixed", 1, 1)])
def test_a_mode_is_played_in_every_round(mode: Mode, k: int, played: int) -> None:
    """Law: there is no probe, trial or baseline, no sequence is left out, and estimates say so."""
    world = World(alpha=0.0, batch=8)
    controller = modes(world)
    play(controller, world, 50)
    controller.set(mode, k)
    assert set(play(controller, world, 300).ks) == {played}
    assert controller.choose(Load(8)).max_speculating is None
    estimates = controller.estimates()
    assert (estimates.mode, estimates.k, estimates.reason) == (
        mode,
        played,
        "fixed" if played else "off",
    )
    assert estimates.speedup == pytest.approx(estimates.rates[played] / estimates.rates[0])
    assert estimates.num_sequences == 8


def test_estimates_survive_a_short_switch_to_auto() -> None:
    """Bug: after off, auto and off again between two steps, sixteen steps had no estimates: the
    resumed controller had chosen nothing yet and was not asked to."""
    world = World(alpha=0.8)
    controller = modes(world)
    play(controller, world, 50)
    controller.set("off")
    play(controller, world, 20)
    controller.set("auto")
    controller.set("off")
    play(controller, world, 1)
    assert len(controller.estimates().rates) == K_MAX + 1


@pytest.mark.parametrize("k", [0, 3])
def test_auto_is_reported_only_once_it_has_chosen(k: int) -> None:
    """Bug: after a switch to auto, the end of a step or an idle engine reported K = 0, no rates and
    an earlier reason, though the controller had chosen nothing yet."""
    world = World(alpha=0.9)
    controller = modes(world)
    play(controller, world, 50)
    controller.set("fixed" if k else "off", k)
    play(controller, world, 20)
    before = controller.estimates()
    controller.set("auto")
    assert controller.estimates() == before
    play(controller, world, 1)
    estimates = controller.estimates()
    assert (estimates.mode, estimates.reason) == ("auto", "pays")
    assert estimates.k > 0
    assert estimates.speedup == pytest.approx(estimates.rates[estimates.k] / estimates.rates[0])


def test_the_controller_is_rarely_asked_in_a_fixed_mode() -> None:
    """Law: a fixed mode costs next to nothing, so comparisons are not charged for the controller;
    its estimates still follow the load."""

    class Counting(AdaptiveK):
        calls = 0

        def choose(self, load: Load) -> Choice:
            self.calls += 1
            return super().choose(load)

    inner = Counting(K_MAX)
    controller = Modes(inner)
    world = World(alpha=0.8)
    world.profile(controller)
    controller.set("off")
    play(controller, world, 160)
    assert inner.calls == 10
    plain = controller.estimates().rates[0]
    play(controller, World(alpha=0.8, batch=16), 16)
    assert controller.estimates().rates[0] > 4 * plain
    controller.set("auto")
    play(controller, world, 20)
    assert inner.calls == 11 + 20


def test_the_controller_learns_in_fixed_mode() -> None:
    """Law: back from fixed mode, the controller knows the acceptance seen in the meantime."""
    world = World(alpha=0.05)
    controller = modes(world)
    play(controller, world, 200)
    world.alpha = 0.95
    controller.set("fixed", 4)
    play(controller, world, 300)
    assert controller.estimates().acceptance > 0.85
    controller.set("auto")
    assert controller.choose(Load(1)).k > 0


class Listener(FixedK):
    """Keeps and drafts at most one draft token; counts how often it is asked."""

    calls = 0

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.heard: list[Sequence[Agreement]] = []

    def update(self, record: StepRecord) -> None:
        self.heard.append(record.hindsight)

    def kept_counts(self, confidences: Confidences) -> list[int]:
        self.calls += 1
        return [min(len(sure), 1) for sure in confidences]

    def keeps_drafting(self, confidences: Confidences) -> bool:
        return False


def test_in_fixed_mode_all_that_is_offered_is_kept() -> None:
    """Law: fixed mode drafts and verifies all K draft tokens; the configured controller still gets
    the draft's confidences."""
    listener = Listener(8)
    controller = Modes(listener)
    sure = [[0.1, 0.2, 0.3], [], [5.0]]
    assert (controller.kept_counts(sure), controller.keeps_drafting(sure)) == ([1, 0, 1], False)
    controller.set("fixed", 4)
    assert (controller.kept_counts(sure), controller.keeps_drafting(sure)) == ([3, 0, 1], True)
    assert listener.calls == 2
    controller.set("auto")
    assert controller.kept_counts(sure) == [1, 0, 1]


@pytest.mark.parametrize(
    ("mode", "k", "k_max"),
    [
        ("fixed", 0, 8),
        ("fixed", 9, 8),
        ("fixed", -1, 8),
        ("fixed", 1, 0),
        ("off", 3, 8),
        ("auto", 3, 8),
    ],
)
def test_a_refused_mode_changes_nothing(mode: Mode, k: int, k_max: int) -> None:
    """Law: the error is one sentence that names the bound, and the mode stays as it was."""
    controller = Modes(FixedK(k_max))
    with pytest.raises(ConfigError, match="`(k|mode)` "):
        controller.set(mode, k)
    assert controller.estimates().mode == "auto"
    assert controller.choose(Load(1)).k == k_max


def test_the_controller_rarely_learns_in_a_fixed_mode() -> None:
    """Law: a fixed K does not pay for the controller's learning, nor for its choice of guesses to
    drop."""
    listener = Listener(8)
    controller = Modes(listener)
    controller.set("fixed", 4)
    for _ in range(160):
        controller.choose(Load(1))
        assert controller.kept_counts([[0.1, 0.2, 0.3]]) == [3]
    assert listener.calls == 10


def test_back_in_auto_it_soon_measures_k_0() -> None:
    """Bug: after a fixed K, which never measures K = 0, speculation continued for hundreds of
    rounds on an outdated cost of K = 0."""
    world = World(alpha=0.6)
    controller = modes(world)
    play(controller, world, 600)
    controller.set("fixed", 4)
    play(controller, world, 200)
    controller.set("auto")
    assert 0 in play(controller, world, 12).ks
