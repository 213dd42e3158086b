"""The engine's recording and its replay: the same accepted lengths, and no text in the file."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ScheduleConfig
from engine.core import Engine
from engine.errors import TraceError
from engine.lab.bench.__main__ import main
from engine.lab.bench.offline import EngineSession, TurnClock
from engine.lab.bench.record import MIXES, drive
from engine.lab.replay.recorded import check, recorded
from engine.lab.replay.scores import play
from engine.messages import Output, SamplingParams, Submit
from engine.scheduling.step_record import StepRecord
from engine.step.trace import Trace, read_trace
from tests.support import tiny, tiny_text
from tests.support.repeat import Repeat

SECRET = "a name that must not be told"
LENGTHS = (40, 25, 33, 50)


def config(target: str, draft: str, trace: Path, controller: dict[str, Any]) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"path": target},
            "device": "cpu",
            "speculation": {
                "proposer": {"kind": "draft_model", "path": draft},
                "controller": controller,
                "trace": str(trace),
            },
            "cache": {"num_blocks": 64},
        }
    )


def serve(engine: Engine, temperature: float) -> dict[str, list[Output]]:
    """Serve four requests, two of which arrive later; return their outputs by id."""
    replies: dict[str, list[Output]] = {}
    waiting = list(enumerate(LENGTHS))
    for step in range(200):
        while waiting and (len(waiting) > 2 or step >= 6):
            i, length = waiting.pop(0)
            params = SamplingParams(seed=i, max_tokens=length, temperature=temperature)
            engine.add(Submit(f"{SECRET} {i}", [5 + i, 9, 40, 41, 7], params, 0.0))
        if not engine.has_work:
            break
        for output in engine.step().items:
            replies.setdefault(output.id, []).append(output)
    return replies


def record(
    target: str, draft: str, path: Path, controller: dict[str, Any], temperature: float = 0.0
) -> tuple[Trace, dict[str, list[Output]]]:
    # Every step takes equally long, so draft tokens pay; on a busy machine none might be made.
    engine = Engine(config(target, draft, path, controller), clock=count(0.0, 1e-4).__next__)
    replies = serve(engine, temperature)
    return read_trace(path), replies


def test_a_trace_gives_the_controller_no_extra_records(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Law: while another mode overrides the controller, tracing gives it no extra records, and the
    trace holds exactly those that it gets."""
    engine = Engine(config(tiny_target, tiny_draft, tmp_path / "t", {"kind": "adaptive"}))
    controller, seen = engine._controller, list[StepRecord]()
    controller.configured.update = seen.append  # type: ignore[method-assign, assignment]
    serve(engine, 0.0)
    steps = read_trace(tmp_path / "t").steps
    assert [step.outcomes for step in seen] == [step.outcomes for step in steps]
    assert any(step.hindsight for step in seen)
    seen.clear()
    engine.set_speculation("fixed", 2)
    serve(engine, 0.0)
    assert len(seen) < 0.2 * (len(read_trace(tmp_path / "t").steps) - len(steps))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "controller", [{"kind": "fixed", "k": 3}, {"kind": "adaptive", "k_max": 5}]
)
def test_recorded_choices_give_the_recorded_lengths(
    controller: dict[str, Any], temperature: float, tiny_target: str, tiny_draft: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    trace, replies = record(tiny_target, tiny_draft, tmp_path / "t", controller, temperature)
    recording = recorded(trace)
    generated = sum(len(output.tokens) for outputs in replies.values() for output in outputs)
    assert recording.tokens == generated
    assert check(recording)[2] == 0
    player = Repeat(recording)
    steps = list(player.play(recording.workload()))
    assert player.other == 0
    assert sum(step.tokens for step in steps) == generated
    ends = [outputs[-1] for outputs in replies.values()]
    accepted = sum(part.accepted for step in steps for part in step.parts)
    assert accepted == sum(end.accepted for end in ends)


@pytest.mark.parametrize("explore", [False, True])
def test_a_recording_under_load_is_repeated(
    explore: bool, tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Law: with prompts chunked between guesses, arrivals as others leave, and K not chosen by the
    controller. Bug: a replay gave draft tokens no share of the step, so prompts ended earlier."""
    base = config(tiny_target, tiny_draft, tmp_path / "t", {"kind": "adaptive", "k_max": 4})
    schedule = ScheduleConfig(max_sequences=4, max_step_tokens=24)
    clock = TurnClock()
    engine = Engine(base.model_copy(update={"schedule": schedule}), clock=clock)
    requests = [
        Submit(
            f"{i}",
            [5 + i, *range(9, 9 + 7 * (i % 4))],
            SamplingParams(seed=i, max_tokens=6 + 11 * i % 40, temperature=float(i % 2)),
            0.0,
        )
        for i in range(12)
    ]
    lanes = [requests[lane::4] for lane in range(4)]
    session = EngineSession(engine=engine, clock=clock, lanes=lanes, whole=True)
    if explore:
        drive(engine, session)
    else:
        session.play(math.inf)
    trace = read_trace(tmp_path / "t")
    recording = recorded(trace)
    assert check(recording)[2] == 0
    player = Repeat(recording)
    steps = list(player.play(recording.workload()))
    assert player.other == 0
    assert len(steps) == len(trace.steps)
    if explore:
        assert {step.k for step in trace.steps} == set(range(5))


def test_another_k_is_predicted_exactly(tiny_target: str, tiny_draft: str, tmp_path: Path) -> None:
    """Law: recorded at K = 5, where all but the last positions have an outcome, and replayed at K =
    2, it accepts what the engine at K = 2 does, except where nothing was proposed."""
    trace, _ = record(tiny_target, tiny_draft, tmp_path / "a", {"kind": "fixed", "k": 5})
    _, replies = record(tiny_target, tiny_draft, tmp_path / "b", {"kind": "fixed", "k": 2})
    accepted = sum(outputs[-1].accepted for outputs in replies.values())
    recording = recorded(trace)
    missing = (1 - recording.known) * recording.tokens
    played = play(recording, [], k_max=5, charge=0.0)
    assert played.fixed[2].accepted == pytest.approx(accepted, abs=missing + 1)


def test_no_text_is_recorded(tiny_target: str, tiny_draft: str, tmp_path: Path) -> None:
    """Law: the file holds only numbers, header names and reasons; a request is a number."""
    record(tiny_target, tiny_draft, tmp_path / "t", {"kind": "fixed", "k": 2})
    text = (tmp_path / "t").read_text()
    assert SECRET not in text
    assert tiny_target not in text
    assert tiny_draft not in text


def texts(replies: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {
        name: [t for output in outputs for t in output.tokens] for name, outputs in replies.items()
    }


def test_a_recording_changes_no_token(tiny_target: str, tiny_draft: str, tmp_path: Path) -> None:
    controller = {"kind": "fixed", "k": 3}
    _, replies = record(tiny_target, tiny_draft, tmp_path / "t", controller, 1.0)
    plain = config(tiny_target, tiny_draft, tmp_path / "t", controller).model_dump()
    plain["speculation"]["trace"] = None
    again = serve(Engine(EngineConfig.model_validate(plain)), 1.0)
    assert texts(replies) == texts(again)


def test_a_trace_that_cannot_be_written_is_a_sentence_at_start(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        Engine(config(tiny_target, tiny_draft, tmp_path / "no" / "t", {"kind": "fixed", "k": 1}))


def test_the_recording_command(tmp_path: Path) -> None:
    """Law: it writes one trace per workload. Bug: it read an option that it does not have. Bug: the
    engine profiled its steps by a clock that stood still."""
    model = tiny_text.target()
    target = tiny_text.save(model, tmp_path / "target")
    draft = tiny_text.save(tiny.draft_of(model), tmp_path / "draft")
    found = tmp_path / "found"
    words = [
        "record",
        "--target",
        target,
        "--draft",
        draft,
        "--output",
        str(found),
        "--tokens",
        "8",
    ]
    assert main(words) == 0
    traces = sorted(found.iterdir())
    assert len(traces) == len(MIXES)
    read = [read_trace(trace) for trace in traces]
    assert all(trace.steps for trace in read)
    profiles = [trace.header.profile for trace in read]
    assert all(seconds > 0 for each in profiles for _, seconds in [*each.target, *each.draft])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cpu-seconds"], "needs --threads 1"),
        ([], "exists already"),
    ],
)
def test_mistakes_of_the_recording_command_are_one_sentence(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", "--output", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
