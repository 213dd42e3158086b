"""One policy in one world: its time and habits, beside those of the references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.control.controller import FixedK, KController
from engine.lab.replay.references import Clairvoyant
from engine.lab.replay.run import Noise, Player, Round
from engine.lab.replay.worlds import NOISE, World

_TRIALS = ("probe", "trial", "baseline", "neighbour")  # reasons of a round that only looks
_PRICES = 3  # refinements of the clairvoyant's price


@dataclass(slots=True)
class References:
    """Seconds of a world, by phase: at every K from 0, and knowing every hit."""

    fixed: list[list[float]]  # [k][phase]
    clairvoyant: list[float]

    @property
    def plain(self) -> float:
        return sum(self.fixed[0])

    @property
    def best_fixed(self) -> float:
        """The best K for the whole world, in hindsight."""
        return min(sum(seconds) for seconds in self.fixed)

    @property
    def oracle(self) -> float:
        """The best K of each phase, known beforehand."""
        phases = range(len(self.clairvoyant))
        return sum(min(seconds[phase] for seconds in self.fixed) for phase in phases)


@dataclass(slots=True)
class Score:
    """What a policy did in a world. Switches are changes of the chosen K from one round of a phase
    to the next; `regime_switches` leave out rounds that only look (probes and the like)."""

    seconds: list[float] = field(default_factory=list)  # by phase, for exactly its tokens
    rounds: int = 0
    pairs: int = 0
    switches: int = 0
    regime_switches: int = 0
    controller_seconds: list[float] = field(default_factory=list)  # of each round at batch 32
    alone_seconds: list[float] = field(default_factory=list)  # and at batch 1

    def add(self, rounds: Sequence[Round], tokens: int) -> None:
        """One phase. Its time is scaled to `tokens`, since the last round may exceed them."""
        seconds = sum(done.seconds for done in rounds)
        self.seconds.append(seconds * tokens / sum(done.tokens for done in rounds))
        self.rounds += len(rounds)
        self.pairs += len(rounds) - 1
        self.switches += _changes([done.k for done in rounds])
        regime = [done.k for done in rounds if done.reason not in _TRIALS]
        self.regime_switches += _changes(regime)
        self.controller_seconds += [r.controller_seconds for r in rounds if r.sequences == 32]
        self.alone_seconds += [r.controller_seconds for r in rounds if r.sequences == 1]

    @property
    def total(self) -> float:
        return sum(self.seconds)


def play(world: World, controller: KController, *, charge: float) -> Score:
    """Play a world with the start-up profile that its machine showed."""
    noise = Noise(NOISE, world.seed)
    player = Player(controller, world.machine, noise=noise, charge=charge)
    controller.profile(world.profiled.profile())
    score = Score()
    for phase, spec in enumerate(world.phases):
        score.add(list(player.rounds(world.workload(phase))), spec.tokens)
    return score


def references(world: World, k_max: int) -> References:
    """All fixed K and the clairvoyant, on the same text and the true costs."""
    machine, phases = world.machine, range(len(world.phases))
    fixed = [
        [_seconds(world, phase, Player(FixedK(k), machine)) for phase in phases]
        for k in range(k_max + 1)
    ]
    knowing = []
    for phase in phases:
        best = min(seconds[phase] for seconds in fixed)
        for _ in range(_PRICES):
            player = Clairvoyant(machine, k_max, price=world.phases[phase].tokens / best)
            best = min(best, _seconds(world, phase, player))
        knowing.append(best)
    return References(fixed, knowing)


def _seconds(world: World, phase: int, player: Player) -> float:
    rounds = list(player.rounds(world.workload(phase)))
    seconds = sum(done.seconds for done in rounds)
    return seconds * world.phases[phase].tokens / sum(done.tokens for done in rounds)


def _changes(values: Sequence[int]) -> int:
    return sum(a != b for a, b in pairwise(values))
