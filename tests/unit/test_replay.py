"""The step loop without models, and the worlds that it is played in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine.control.acceptance import Outcome
from engine.control.controller import FixedK, StepObservation
from engine.lab import simulate
from engine.lab.replay.costs import Roofline
from engine.lab.replay.references import Clairvoyant
from engine.lab.replay.run import Player
from engine.lab.replay.scores import play, references
from engine.lab.replay.streams import Live, Request
from engine.lab.replay.worlds import PhaseSpec, Text, World, random_world

HITS = [True, True, True, False, True, False, False, True, True, True, True, True]


@dataclass
class Script(FixedK):
    """A controller that does as it is told, and writes down what it was told."""

    uses_hindsight = True

    ks: list[int] = field(default_factory=list)
    stop_at: int = 99
    keep_at: int = 99
    limit: int | None = None
    seen: list[StepObservation] = field(default_factory=list)
    asked: list[list[Sequence[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.k_max = 8
        self.reason = "fixed"

    @property
    def max_speculating(self) -> int | None:  # type: ignore[override]
        return self.limit

    def choose(self, load: object) -> int:
        return self.ks[min(len(self.seen), len(self.ks) - 1)]

    def goes_on(self, confidences: Sequence[Sequence[float]]) -> bool:
        self.asked.append([list(row) for row in confidences])
        return len(confidences[0]) < self.stop_at

    def keep(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [min(len(row), self.keep_at) for row in confidences]

    def update(self, observation: StepObservation) -> None:
        self.seen.append(observation)


@dataclass
class Given:
    """These requests at once, to their end."""

    requests: list[Request]
    begun: bool = False
    live: list[Live] = field(default_factory=list)

    def admit(self, batch: list[Live], tokens: int) -> None:
        if not self.begun:
            self.begun = True
            self.live = [Live(request) for request in self.requests]
            batch += self.live

    def over(self, tokens: int, rounds: int) -> bool:
        return self.begun and all(live.ended for live in self.live)


def request(hits: Sequence[bool] = HITS) -> Request:
    return Request(hits, [float(i) for i in range(len(hits))], len(hits), context=10)


def outcomes(script: Script, hits: Sequence[bool] = HITS) -> list[tuple[int, int]]:
    player = Player(script, Roofline(), clock=lambda: 0.0)
    rounds = list(player.rounds(Given([request(hits)])))
    assert sum(done.tokens for done in rounds) == len(hits)
    return [(seen.outcomes[0].offered, seen.outcomes[0].right) for seen in script.seen]


def test_a_round_keeps_the_hits_up_to_the_first_miss_and_one_more_token() -> None:
    # Positions 0-2 hit and 3 misses: four tokens; 4 hits, 5 misses: two; 6 misses; 7-10 hit and
    # the eleventh is the target's own.
    assert outcomes(Script(ks=[4])) == [(4, 3), (4, 1), (4, 0), (4, 4)]


def test_no_guess_is_scored_beyond_what_is_known() -> None:
    assert outcomes(Script(ks=[3]), [True] * 5) == [(3, 3), (1, 1)]


def test_drafting_stops_where_the_controller_says_and_only_that_is_paid() -> None:
    """`goes_on` is asked after each forward but the last, with the confidences so far."""
    script = Script(ks=[4], stop_at=2)
    rounds = list(Player(script, Roofline(), clock=lambda: 0.0).rounds(Given([request()])))
    assert script.asked[:2] == [[[0.0]], [[0.0, 1.0]]]
    machine = Roofline()
    paid = machine.draft(1) + machine.draft(1) + machine.target(3, 1, 10)
    assert rounds[0].depth == 2
    assert rounds[0].seconds == pytest.approx(paid)
    assert script.seen[0].outcomes == [Outcome(2, 2, 2)]


@pytest.mark.parametrize(
    ("ks", "stop_at", "keep_at"),
    [([2], 99, 99), ([0, 0, 3, 1], 99, 99), ([4], 99, 1), ([5], 3, 2), ([0, 4], 2, 0)],
)
def test_every_position_is_told_once(ks: list[int], stop_at: int, keep_at: int) -> None:
    """The law of coupling: each position but for a tail is found out exactly once, verified, left
    out or agreed, whatever was chosen: accepted rounds, spells at 0, dropped guesses, stops."""
    script = Script(ks=ks, stop_at=stop_at, keep_at=keep_at)
    list(Player(script, Roofline(), clock=lambda: 0.0).rounds(Given([request()])))
    told: list[tuple[float, bool]] = []
    for seen in script.seen:
        told += [pair for stretch in seen.agreements for pair in stretch]
        for outcome, row in zip(seen.outcomes, seen.confidences, strict=True):
            told += [(sure, i < outcome.right) for i, sure in enumerate(row)]
    positions = sorted(int(sure) for sure, _ in told)
    assert positions == list(range(len(positions)))
    assert all(hit == HITS[int(sure)] for sure, hit in told)
    assert len(positions) >= len(HITS) - 3


def test_who_knows_all_hits_is_never_slower_than_the_oracle() -> None:
    known = references(random_world(1004), k_max=6)
    assert sum(known.clairvoyant) <= known.oracle <= known.best_fixed <= known.plain


def test_the_clairvoyant_verifies_nothing_in_vain() -> None:
    """A draft that costs nothing and a target that costs the same at every size: one round for each
    run of hits."""
    free = Roofline(ridge=1e9, draft_step=0.0, draft_row=0.0, kv_token=0.0)
    rounds = list(Clairvoyant(free, k_max=8, price=0.0).rounds(Given([request()])))
    assert [done.tokens for done in rounds] == [4, 2, 1, 5]
    assert [done.proposed for done in rounds] == [3, 1, 0, 4]


def test_a_world_is_its_number() -> None:
    """Common random numbers: neither the policy nor the order of play changes the text."""
    first, again = random_world(7), random_world(7)
    again.request(2, 5)
    assert first == again or first.phases == again.phases
    assert first.request(1, 3).hits == again.request(1, 3).hits
    assert first.request(1, 3).hits != first.request(2, 3).hits
    assert random_world(8).machine != first.machine


def test_acceptance_of_a_world_is_what_it_was_drawn_with() -> None:
    world = World(1, Roofline(), Roofline(), Text(), [PhaseSpec((0.7,), 1, 1, spread=0.0)])
    hits = [hit for j in range(60) for hit in world.request(0, j).hits]
    assert sum(hits) / len(hits) == pytest.approx(0.7, abs=0.02)  # 24k positions, four sigma


def test_time_charged_to_the_controller_counts() -> None:
    ticks = iter(range(10**9))
    player = Player(FixedK(0), Roofline(), charge=1.0, clock=lambda: float(next(ticks)))
    for done in player.rounds(Given([request()])):
        assert done.seconds > done.controller_seconds > 0


def test_switches_are_counted_within_phases() -> None:
    world = random_world(1005)
    assert play(world, FixedK(2), charge=0.0).switches == 0
    assert play(world, Script(ks=[1, 2]), charge=0.0).switches == 1


def test_the_command_prints_a_line_for_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--worlds", "1", "--first", "105", "--policy", "fixed:1", "--k-max", "2"]
    assert simulate.main([*arguments, "--processes", "1", "--reactions", "0", "--each"]) == 0
    printed = capsys.readouterr().out
    assert "fixed:1" in printed
    assert "clairvoyant" in printed


@pytest.mark.parametrize(
    "name", ["fastest", "fixed:17", "fixed:", "engine.nothing:K", ":", "json:loads", "math:sqrt"]
)
def test_an_unknown_policy_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: one that could not be built for a K ended in a traceback."""
    assert simulate.main(["--policy", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert repr(name) in error
