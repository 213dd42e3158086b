"""The engine as a child process (`python -m engine.lab.evaluate`), one question at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Self, TypeVar

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.lab.evaluate_messages import (
    Batch,
    Command,
    CompareTokens,
    Event,
    Margin,
    Ran,
    Start,
    receive,
    send,
)
from engine.messages import Fatal, Ready

Answer = TypeVar("Answer")

COMMAND = (sys.executable, "-m", "engine.lab.evaluate")
KILL_SECONDS = 10.0


class Child:
    """A context manager; `ready` is known inside. Raises EngineError when the engine cannot be made
    from this configuration, or is lost."""

    ready: Ready

    def __init__(self, config: EngineConfig, *, command: Sequence[str] = COMMAND) -> None:
        self._config = config
        self._command = command

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self.ready = self._ask(Start(self._config.model_dump_json()), Ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """The child ends with its stdin; in the middle of a step it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_SECONDS)

    def run(self, batch: Batch) -> Ran:
        return self._ask(batch, Ran)

    def margin(self, tokens: CompareTokens) -> float | None:
        return self._ask(tokens, Margin).margin

    def _ask(self, command: Command, kind: type[Answer]) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer: Event | None = None
        with suppress(BrokenPipeError):
            send(self._process.stdin, command)
            answer = receive(self._process.stdout, Event)
        if answer is None:
            code = self._process.wait()
            raise EngineError(f"the engine ended with exit code {code}; what it said is above")
        if isinstance(answer, Fatal):
            raise EngineError(answer.message)
        assert isinstance(answer, kind), answer
        return answer
