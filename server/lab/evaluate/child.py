"""The engine as a child process (`python -m engine.lab.evaluate`), one question at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.lab.evaluate_messages import (
    Batch,
    Command,
    Event,
    Ran,
    Start,
    Weigh,
    Weighed,
    receive,
    send,
)
from engine.messages import Fatal, Ready

COMMAND = (sys.executable, "-m", "engine.lab.evaluate")
END_SECONDS = 10.0


class Child:
    """A context manager; `ready` is known inside. Raises EngineError when the engine cannot be made
    from this configuration, or is lost."""

    def __init__(self, config: EngineConfig, *, command: Sequence[str] = COMMAND) -> None:
        self._config = config
        self._command = command

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            ready = self._ask(Start(self._config.model_dump_json()))
        except BaseException:
            self._end()
            raise
        assert isinstance(ready, Ready), ready
        self.ready = ready
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, batch: Batch) -> Ran:
        ran = self._ask(batch)
        assert isinstance(ran, Ran), ran
        return ran

    def weigh(self, weigh: Weigh) -> float | None:
        weighed = self._ask(weigh)
        assert isinstance(weighed, Weighed), weighed
        return weighed.margin

    def _ask(self, command: Command) -> Event:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, command)
            answer: Event | None = receive(self._process.stdout, Event)
        except BrokenPipeError:
            answer = None
        if answer is None:
            code = self._process.wait()
            raise EngineError(f"the engine ended with exit code {code}; what it said is above")
        if isinstance(answer, Fatal):
            raise EngineError(answer.message)
        return answer

    def _end(self) -> None:
        """It ends with its stdin; in the middle of a step it is ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
