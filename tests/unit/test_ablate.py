"""Ablation on traces: the controller with one refinement removed at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.control.controller import Load
from engine.control.profile import Profile
from engine.lab.replay import scores
from engine.lab.replay.__main__ import main
from engine.lab.replay.recorded import recorded
from engine.lab.replay.variants import STOP, VARIANTS, WHOLE
from engine.scheduling.step_record import Agreement, SequenceStep, StepRecord
from engine.step.trace import Trace
from tests.support.controller_world import K_MAX, World, play
from tests.unit.test_trace import served, write


def test_a_line_for_each_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", served(3))
    write(tmp_path / "b.jsonl", served(4, requests=1))
    figures = tmp_path / "f.json"
    assert main([str(tmp_path), "--ablate", "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 traces")
    for word in VARIANTS:
        assert word in printed
    assert [scene["name"] for scene in json.loads(figures.read_text())] == ["a", "b"]


def test_a_trace_whose_drafter_cannot_stop_is_not_judged_on_stopping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stops in (False, True):
        path = write(tmp_path / f"{stops}.jsonl", served(5, stops=stops))
        assert main([str(path), "--ablate"]) == 0
        assert (STOP in capsys.readouterr().out) == stops


def test_without_the_confidence_stop_unlikely_tokens_are_drafted() -> None:
    """Law: without the confidence stop all chosen steps are drafted; with it, drafting stops at an
    unlikely token. Bug: in a step that the controller skipped, it judged another step's token."""
    found = []
    for name in (WHOLE, STOP):
        world = World(alpha=0.7, informed=2.0)
        controller = VARIANTS[name](K_MAX, stops=True)
        world.profile(controller)
        play(controller, world, 300)
        for lead in (8.0, -4.0):
            controller.choose(Load(1))
            found.append(controller.keeps_drafting([[lead]]))
    assert found == [True, False, True, True]


def test_equal_seeds_give_equal_results() -> None:
    """Law: variants share random numbers, so only the removed refinement makes them differ."""
    scene = recorded(served(3))
    first, again = (scores.play(scene, list(VARIANTS), k_max=4, charge=0.0) for _ in range(2))
    assert first.policies == again.policies


def test_a_trace_without_speculation_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a trace with K = 0 raised a traceback about array shapes, or printed a table of ones."""
    trace = served(0)
    write(tmp_path / "t.jsonl", Trace(replace(trace.header, k_max=0), trace.steps))
    assert main([str(tmp_path), "--ablate"]) == 2
    assert "no draft tokens" in capsys.readouterr().err


CONFIDENCES = [[9.0, 9.0, 9.0, 9.0], [0.1, 0.1, 0.1, 0.1]]


def test_draft_tokens_of_little_confidence_are_verified_only_without_that_refinement() -> None:
    controller = VARIANTS[WHOLE](4, stops=False)
    controller.costs.set_profile(Profile([(1, 1e-3), (2, 1.2e-3), (16, 4e-3)], [(1, 1e-5)]))
    controller.choose(Load(2))
    kept = controller.kept_counts(CONFIDENCES)
    assert kept[0] > kept[1]
    assert VARIANTS["verify all draft tokens"](4).kept_counts(CONFIDENCES) == [4, 4]


@pytest.mark.parametrize("name", ["no hindsight", "profile only"])
def test_a_removed_signal_is_not_learnt_from(name: str) -> None:
    record = StepRecord(
        [SequenceStep(0, 0, 0, rows=1 if name == "profile only" else 9)],
        target_seconds=9.0,
        hindsight=[Agreement(0, 0, [(1.0, False)] * 9)] if name == "no hindsight" else (),
    )
    controller, fresh = VARIANTS[name](4), VARIANTS[name](4)
    controller.update(record)
    controller.choose(Load(1))
    fresh.choose(Load(1))
    assert controller.estimates() == fresh.estimates()


def test_a_folder_without_traces_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds no traces" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("name", "learns"), [("no change test", True), ("profile only", False)])
def test_every_variant_but_profile_only_learns_costs(name: str, learns: bool) -> None:
    """Bug: "no optimism" learnt costs from observations that it had not asked for, and "profile
    only" learnt from steps that it merely observed."""
    world, controller = World(alpha=0.8, batch=4), VARIANTS[name](K_MAX, stops=False)
    world.profile(controller, wrong_by=1.5)
    costs = controller.costs
    before = costs.by_rows(4, 20)[20], costs.drafting(4)
    for _ in range(300):
        seen = world.round(controller, controller.choose(Load(world.batch)))
        controller.update(seen)
    after = costs.by_rows(4, 20)[20], costs.drafting(4)
    assert (after != before) == learns
