"""EngineProcess with a scripted engine, and both ends of the wire in this process."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import zmq

from engine.__main__ import read_config
from engine.errors import ConfigError, EngineError
from engine.messages import (
    Abort,
    Command,
    Drain,
    Draining,
    Event,
    Fatal,
    Mode,
    Output,
    Outputs,
    Ready,
    SamplingParams,
    SetSpeculation,
    Stop,
    Submit,
    SwapDraft,
)
from engine.process import EngineProcess, StepEngine
from tests.support.scripted import Script, ScriptedEngine, expected_tokens, make_engine


class FrontEnd:
    """Sends all commands before the engine runs, and reads all events after it."""

    def __init__(self, folder: Path) -> None:
        self.commands, self.events = f"ipc://{folder}/c", f"ipc://{folder}/e"
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._in = self._context.socket(zmq.PULL)
        self._gone = self._in.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._out.bind(self.commands)
        self._in.bind(self.events)

    def run(
        self, make: Callable[[], StepEngine], *commands: Command | bytes, alone: bool = False
    ) -> tuple[int, list[Event]]:
        """Return the exit code and every event."""
        process = EngineProcess(make, self.commands, self.events, alone=alone)
        for command in commands:
            data = command if isinstance(command, bytes) else msgspec.msgpack.encode(command)
            self._out.send(data)
        with patch("engine.process.BEAT_MILLISECONDS", 20):
            code = process.run()
        assert self._gone.poll(10_000)  # every event it sent has been read from its socket
        events: list[Event] = []
        while self._in.poll(10):
            events.append(msgspec.msgpack.decode(self._in.recv(), type=Event))
        return code, events

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    handler = signal.getsignal(signal.SIGTERM)
    front_end = FrontEnd(tmp_path)
    yield front_end
    front_end.close()
    signal.signal(signal.SIGTERM, handler)
    gc.unfreeze()  # an engine process freezes the objects it has built


def scripted(script: Script) -> Callable[[], StepEngine]:
    return lambda: make_engine(script)


def submit(id: str, prompt: list[int], max_tokens: int) -> Submit:
    return Submit(id, prompt, SamplingParams(seed=0, max_tokens=max_tokens), 0.0)


def outputs_of(events: list[Event], id: str) -> list[Output]:
    items = [item for event in events if isinstance(event, Outputs) for item in event.items]
    return [item for item in items if item.id == id]


def test_drain_finishes_what_runs_and_takes_nothing_new(front_end: FrontEnd) -> None:
    """Law: Ready is first; requests before Drain complete, later ones are not taken; exit 0."""
    code, events = front_end.run(
        scripted(Script(tokens_per_step=3, step_seconds=0.05)),
        submit("a", [1, 2], 8),
        submit("b", [3], 2),
        Drain(),
        submit("late", [1], 5),
    )
    assert code == 0
    assert isinstance(events[0], Ready)
    for id, prompt, count in (("a", [1, 2], 8), ("b", [3], 2)):
        items = outputs_of(events, id)
        assert sum((item.tokens for item in items), []) == expected_tokens(prompt, count)
        assert [item.finish for item in items if item.finish] == ["length"]
    assert Draining() in events
    assert outputs_of(events, "late") == []


def test_stop_ends_without_finishing(front_end: FrontEnd) -> None:
    """Law: Stop does not wait for requests, however long they are."""
    code, events = front_end.run(scripted(Script()), submit("a", [1], 10**9), Stop())
    assert code == 0
    assert not any(item.finish for item in outputs_of(events, "a"))


def test_an_abort_is_acknowledged(front_end: FrontEnd) -> None:
    """Law: an abort always yields one Output with finish `abort`, even if nothing else runs."""
    code, events = front_end.run(
        scripted(Script()), submit("a", [1], 10**9), Abort(["a", "unknown"]), Drain()
    )
    assert code == 0
    assert [item.finish for item in outputs_of(events, "a")] == ["abort"]


def test_an_idle_engine_beats(front_end: FrontEnd) -> None:
    """Law: an idle engine sends empty Outputs with the gauges."""
    beats: list[int] = []

    def make() -> StepEngine:
        engine = make_engine(Script())
        gauges = engine.gauges

        def count() -> object:
            beats.append(1)
            if len(beats) == 2:
                signal.raise_signal(signal.SIGTERM)
            return gauges()

        engine.gauges = count  # type: ignore[method-assign,assignment]
        return engine

    code, events = front_end.run(make)
    assert code == 0
    assert [type(event) for event in events] == [Ready, Outputs, Outputs]
    assert events[1] == Outputs([], make_engine(Script()).gauges())


def test_sigterm_drains(front_end: FrontEnd) -> None:
    """Law: after `kill PID` the engine completes running requests and exits 0, as for Drain."""

    def make() -> StepEngine:
        engine = make_engine(Script())
        step = engine.step

        def step_with_signal() -> Outputs:
            signal.raise_signal(signal.SIGTERM)
            return step()

        engine.step = step_with_signal  # type: ignore[method-assign]
        return engine

    code, events = front_end.run(make, submit("a", [1], 4))
    assert code == 0
    assert [item.finish for item in outputs_of(events, "a")] == [None, None, None, "length"]


def test_a_refusal_to_start_is_one_sentence_and_exit_code_2(
    front_end: FrontEnd, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: an error that the operator can fix is reported once, without a traceback: by the parent
    process, or in the log if the engine runs alone."""
    refusing = scripted(Script(refuse_to_start="no such\n\n  folder: /x"))
    for alone in (False, True):
        code, events = front_end.run(refusing, alone=alone)
        assert code == 2
        assert events == [Fatal("no such folder: /x", permanent=True)]
        assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [
            ("the engine stops: no such folder: /x", None)
        ] * alone


@pytest.mark.parametrize(
    "script", [Script(crash_at_start=True), Script(raise_after=2)], ids=["start", "step"]
)
def test_the_unexpected_is_fatal_with_a_traceback_in_the_log(
    front_end: FrontEnd, caplog: pytest.LogCaptureFixture, script: Script
) -> None:
    """Law: the last message is Fatal, the exit code is 1, and the log has the traceback."""
    code, events = front_end.run(scripted(script), submit("a", [1], 9))
    assert code == 1
    assert events[-1] == Fatal("the engine failed: RuntimeError: the script says so")
    assert caplog.records[-1].exc_info is not None


def test_an_error_for_people_in_a_step_is_fatal_without_a_traceback(
    front_end: FrontEnd, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: the code is 1, not 2, because this configuration served before the failing step."""

    def make() -> StepEngine:
        engine = make_engine(Script())

        def step() -> Outputs:
            raise EngineError("the device is gone")

        engine.step = step  # type: ignore[method-assign]
        return engine

    code, events = front_end.run(make, submit("a", [1], 9), alone=True)
    assert code == 1
    assert events[-1] == Fatal("the device is gone")
    assert caplog.records[-1].exc_info is None


def test_a_command_that_does_not_decode_is_fatal(front_end: FrontEnd) -> None:
    """Law: both ends are ours, so garbage is a bug that serving on would hide."""
    code, events = front_end.run(scripted(Script()), b"\xc1")
    assert code == 1
    assert isinstance(events[-1], Fatal)


# -- the configuration file ----------------------------------------------------------------------


def test_the_configuration_is_json(tmp_path: Path) -> None:
    """Law: the engine reads the JSON that the supervisor writes."""
    (tmp_path / "c.json").write_text('{"threads": 3}')
    assert read_config(tmp_path / "c.json").threads == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"threads": 0}', "threads: .* greater than or equal to 1 .given: 0"),
        ('{"colour": 1}', "colour: Extra inputs are not permitted"),
        ("{", "the configuration: Invalid JSON"),
        ("[]", "the configuration: Input should be an object"),
    ],
)
def test_a_bad_configuration_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """Law: the error names the key, the given value and what is allowed."""
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_config(tmp_path / "c.json")


def test_a_missing_configuration_is_a_sentence(tmp_path: Path) -> None:
    """Law: the error names the file."""
    with pytest.raises(ConfigError, match="nowhere.json: No such file"):
        read_config(tmp_path / "nowhere.json")


def test_a_mode_is_obeyed_and_shown_at_once(front_end: FrontEnd) -> None:
    """Law: every step after the command uses the mode, the text stays the same, and the next event
    reports the mode, even if the engine is idle."""
    script = Script(tokens_per_step=4)
    code, events = front_end.run(
        scripted(script),
        SetSpeculation("fixed", 2),
        submit("a", [1, 2], 12),
        SetSpeculation("off"),
        submit("b", [1, 2], 3),
        Drain(),
    )
    outputs = [event for event in events if isinstance(event, Outputs)]
    modes = [(o.metrics.estimates.mode, o.metrics.estimates.k) for o in outputs]
    assert modes[:2] == [("fixed", 2), ("off", 0)]
    assert code == 0
    items = [item for event in outputs for item in event.items]
    assert {item.id: item.rounds for item in items} == {"a": 12, "b": 3}
    assert [t for i in items if i.id == "a" for t in i.tokens] == expected_tokens([1, 2], 12)


def test_an_immediate_refusal_of_a_draft_is_reported_at_once(front_end: FrontEnd) -> None:
    """Law: even an idle engine reports the refusal; a swap that is not possible now is ignored."""

    class Strict(ScriptedEngine):
        def swap_draft(self, path: str) -> None:
            if path == "second":
                raise ConfigError("'first' is being loaded")
            super().swap_draft(path)

    def make() -> StepEngine:
        plain = make_engine(Script())
        return Strict(plain.script, plain.ready)

    code, events = front_end.run(make, SwapDraft("first"), SwapDraft("second"), Drain())
    swaps = [event.metrics.swap for event in events if isinstance(event, Outputs)]
    assert code == 0
    assert [swap and (swap.draft, swap.outcome) for swap in swaps] == [("first", "refused"), None]


def test_a_mode_that_cannot_be_is_passed_over(front_end: FrontEnd) -> None:
    """Law: an invalid mode from the front end is ignored and does not end the engine."""

    class Strict(ScriptedEngine):
        def set_speculation(self, mode: Mode, k: int = 0) -> None:
            raise ConfigError("`k` is 9")

    def make() -> StepEngine:
        plain = make_engine(Script())
        return Strict(plain.script, plain.ready)

    code, events = front_end.run(make, SetSpeculation("fixed", 9), submit("a", [1], 2), Drain())
    assert code == 0
    assert sum(len(i.tokens) for e in events if isinstance(e, Outputs) for i in e.items) == 2
