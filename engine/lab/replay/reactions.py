"""How fast a policy reacts: to a drop of the acceptance, and to good text while it is off."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from engine.control.controller import KController
from engine.lab.replay.costs import Roofline
from engine.lab.replay.run import Noise, Player
from engine.lab.replay.worlds import PhaseSpec, Text, World

NEVER = 450  # rounds after the change that are played
_BEFORE = 400  # and before it
_WINDOW = 10
_SETTLED = 200  # rounds after the change from which on the policy has settled

Build = Callable[[], KController]


def after_drop(build: Build, seed: int) -> int:
    """Acceptance falls from .9 to .3 at a batch of 4: rounds until the mean draft length of ten
    rounds is within 1 of where it settles."""
    depths = _depths(build(), seed, 0.9, 0.3, batch=4)
    final = mean(depths[_BEFORE + _SETTLED :])
    for i in range(_BEFORE, len(depths) - _WINDOW):
        if abs(mean(depths[i : i + _WINDOW]) - final) <= 1:
            return i - _BEFORE
    return NEVER


def back_from_off(build: Build, seed: int) -> int:
    """Acceptance rises from .3 to .95 at a batch of 32, where .3 does not pay: rounds until eight
    of ten rounds speculate."""
    depths = _depths(build(), seed, 0.3, 0.95, batch=32)
    for i in range(_BEFORE, len(depths) - _WINDOW):
        if sum(depth > 0 for depth in depths[i : i + _WINDOW]) >= 0.8 * _WINDOW:
            return i - _BEFORE
    return NEVER


def _depths(
    controller: KController, seed: int, before: float, after: float, *, batch: int
) -> list[int]:
    machine = Roofline()
    profiled = Roofline(
        weights=1.1 * machine.weights,
        ridge=1.1 * machine.ridge,
        launch=1.1 * machine.launch,
        draft_step=0.9 * machine.draft_step,
        draft_row=0.9 * machine.draft_row,
    )
    phases = [
        PhaseSpec((before,), batch, 0, max_rounds=_BEFORE),
        PhaseSpec((after,), batch, 0, max_rounds=NEVER),
    ]
    world = World(50 + seed, machine, profiled, Text(), phases)
    controller.profile(profiled.profile())
    player = Player(controller, machine, noise=Noise(0.03, seed))
    return [done.depth for phase in range(2) for done in player.rounds(world.workload(phase))]
