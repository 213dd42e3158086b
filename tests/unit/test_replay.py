"""The step loop without models, and the worlds that it is played in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from engine.control.controller import Choice, FixedK
from engine.lab import simulate
from engine.lab.replay.play import Player, Request, Workload
from engine.lab.replay.scores import play
from engine.lab.replay.worlds import PhaseSpec, Roofline, Text, World, random_world
from engine.scheduling.step_record import Outcome, StepRecord

HITS = [True, True, True, False, True, False, False, True, True, True, True, True]


@dataclass
class Script(FixedK):
    """A controller that follows its script and records what it is told."""

    ks: list[int] = field(default_factory=list)
    stop_at: int = 99
    keep_at: int = 99
    limit: int | None = None
    seen: list[StepRecord] = field(default_factory=list)
    confidences: list[list[Sequence[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(8)

    def choose(self, load: object) -> Choice:
        k = self.ks[min(len(self.seen), len(self.ks) - 1)]
        return Choice(k, "fixed", self.limit)

    def keeps_drafting(self, confidences: Sequence[Sequence[float]]) -> bool:
        self.confidences.append([list(row) for row in confidences])
        return len(confidences[0]) < self.stop_at

    def kept_counts(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        return [min(len(row), self.keep_at) for row in confidences]

    def update(self, record: StepRecord) -> None:
        self.seen.append(record)


def request(hits: Sequence[bool] = HITS) -> Request:
    return Request(hits, [float(i) for i in range(len(hits))], len(hits), context=10)


def given(*requests: Request) -> Workload:
    """Return a workload of these requests, all arriving at once and played to their end."""
    return Workload(requests, sum(each.length for each in requests))


def outcomes(script: Script, hits: Sequence[bool] = HITS) -> list[tuple[int, int]]:
    player = Player(script, Roofline(), clock=lambda: 0.0)
    steps = list(player.play(given(request(hits))))
    assert sum(step.tokens for step in steps) == len(hits)
    return [(seen.outcomes[0].offered, seen.outcomes[0].right) for seen in script.seen]


def test_a_round_keeps_the_hits_up_to_the_first_miss_and_one_more_token() -> None:
    # Positions 0-2 hit, 3 misses: four tokens. 4 hits, 5 misses: two. 6 misses: one. 7-10 hit, and
    # the eleventh token is the target's own.
    assert outcomes(Script(ks=[4])) == [(4, 3), (4, 1), (4, 0), (4, 4)]


def test_no_draft_token_is_scored_beyond_what_is_known() -> None:
    assert outcomes(Script(ks=[3]), [True] * 5) == [(3, 3), (1, 1)]


def test_drafting_stops_where_the_controller_says_and_only_that_is_paid() -> None:
    """Law: `keeps_drafting` gets all confidences after each draft forward except the last."""
    script = Script(ks=[4], stop_at=2)
    steps = list(Player(script, Roofline(), clock=lambda: 0.0).play(given(request())))
    assert script.confidences[:2] == [[[0.0]], [[0.0, 1.0]]]
    machine = Roofline()
    paid = machine.draft(1) + machine.draft(1) + machine.target(3, 1, 10)
    assert steps[0].seconds == pytest.approx(paid)
    assert script.seen[0].outcomes == [Outcome(2, 2, 2)]


@pytest.mark.parametrize(
    ("ks", "stop_at", "keep_at"),
    [([2], 99, 99), ([0, 0, 3, 1], 99, 99), ([4], 99, 1), ([5], 3, 2), ([0, 4], 2, 0)],
)
def test_every_position_is_reported_once(ks: list[int], stop_at: int, keep_at: int) -> None:
    """Law: each position, except for a tail, is reported exactly once (verified, left out or
    agreed), whatever was chosen: full acceptance, spells at K = 0, dropped guesses or stops."""
    script = Script(ks=ks, stop_at=stop_at, keep_at=keep_at)
    list(Player(script, Roofline(), clock=lambda: 0.0).play(given(request())))
    pairs: list[tuple[float, bool]] = []
    for seen in script.seen:
        pairs += [pair for found in seen.hindsight for pair in found.compared]
        for outcome, row in zip(seen.outcomes, seen.confidences, strict=True):
            pairs += [(sure, i < outcome.right) for i, sure in enumerate(row)]
    positions = sorted(int(sure) for sure, _ in pairs)
    assert positions == list(range(len(positions)))
    assert all(hit == HITS[int(sure)] for sure, hit in pairs)
    assert len(positions) >= len(HITS) - 3


def test_prompts_share_the_budget_with_draft_tokens() -> None:
    """Law: in each step a prompt of 9 rows gets what a decoding sequence leaves of 8. It samples
    once it is complete, and from then on draft tokens are made for both."""
    first, second = request(), Request(HITS, [1.0] * len(HITS), len(HITS), prompt=9, due=1)
    player = Player(FixedK(2), Roofline(), budget=8)
    steps = list(player.play(Workload([first, second], 2 * len(HITS))))
    rows = [[part.rows for part in step.parts] for step in steps]
    assert rows[:4] == [[1], [1, 5], [1, 4], [1, 1]]
    assert [part.tokens > 0 for step in steps[1:3] for part in step.parts] == [True, False] + [
        True
    ] * 2
    assert steps[1].prompt_rows == 4


def test_the_best_k_by_phase_is_never_slower_than_one_k() -> None:
    world = random_world(1004)
    played = play(world, [], k_max=6, charge=0.0)
    assert played.oracle.total <= played.best.total <= played.fixed[0].total


def test_a_world_is_its_number() -> None:
    """Law: common random numbers: neither the policy nor the order of play changes the text."""
    first, again = random_world(7), random_world(7)
    again.request(2, 5)
    assert first == again or first.phases == again.phases
    assert first.request(1, 3).hits == again.request(1, 3).hits
    assert first.request(1, 3).hits != first.request(2, 3).hits
    assert random_world(8).costs != first.costs


def test_a_world_has_the_acceptance_it_was_drawn_with() -> None:
    world = World(1, Roofline(), Roofline().profile(), Text(), [PhaseSpec(0.7, 1, 1, spread=0.0)])
    hits = [hit for j in range(60) for hit in world.request(0, j).hits]
    assert sum(hits) / len(hits) == pytest.approx(0.7, abs=0.02)  # 24k positions, four sigma


def test_time_charged_to_the_controller_counts() -> None:
    ticks = iter(range(10**9))
    player = Player(FixedK(0), Roofline(), charge=1.0, clock=lambda: float(next(ticks)))
    _, *later = player.play(given(request()))
    assert all(step.seconds > step.overhead_seconds > 0 for step in later)


def test_switches_are_counted_within_phases() -> None:
    world = random_world(1005)
    for script, switches in ((FixedK(2), 0), (Script(ks=[1, 2]), 1)):
        assert world.score("", Player(script, world.costs)).switches == switches


def test_the_command_prints_a_line_for_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--worlds", "1", "--first", "105", "--policy", "no hindsight", "--k-max", "2"]
    assert simulate.main([*arguments, "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "no hindsight" in printed
    assert "best fixed K in hindsight" in printed


def test_no_k_is_too_large_for_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the largest K that is allowed fits a step of the most requests. Bug: larger ones ended
    with a traceback in worlds of 32 requests."""
    world = World(1, Roofline(), Roofline().profile(), Text(), [PhaseSpec(0.7, 32, 500)])
    assert play(world, [], k_max=15, charge=0.0).best.total > 0
    with pytest.raises(SystemExit):
        simulate.main(["--k-max", "16"])
    assert "'16' is not a whole number from 1 to 15" in capsys.readouterr().err


def test_an_unknown_policy_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.main(["--policy", "fastest"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'fastest'" in error
