"""EngineProcess: the loop between the sockets and an engine, and how this process exits.

Promises: commands are handled between steps; an idle engine sends a heartbeat each second from this
same loop, so a stuck step shows as silence; the last message of a failing process is Fatal. Does
not import torch: the engine is built by a function that is passed in.

Exit codes: 0 drained or stopped; 1 unexpected error, or the parent is gone; 2 the engine could not
be built from this configuration (an EngineError), so a restart is useless.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq

from engine.child import freeze_memory
from engine.errors import EXIT_CANNOT_START, EngineError, one_line
from engine.messages import (
    Abort,
    Command,
    Drain,
    Draining,
    Event,
    Fatal,
    Mode,
    Outputs,
    Ready,
    SetSpeculation,
    Starting,
    StepMetrics,
    Stop,
    Submit,
    SwapDraft,
)
from engine.progress import reported_to

logger = logging.getLogger(__name__)

BEAT_MILLISECONDS = 1000
LINGER_MILLISECONDS = 2000  # for the last messages to be sent

EXIT_DONE = 0
EXIT_UNEXPECTED = 1


class StepEngine(Protocol):
    """The interface of an engine to this loop (engine.core.Engine, or a fake in tests)."""

    ready: Ready

    @property
    def has_work(self) -> bool: ...

    def add(self, submit: Submit) -> None: ...

    def abort(self, ids: Iterable[str]) -> None: ...

    def step(self) -> Outputs: ...

    def gauges(self) -> StepMetrics: ...

    def set_speculation(self, mode: Mode, k: int = 0) -> None: ...

    def swap_draft(self, path: str) -> None: ...


class EngineProcess:
    """The command loop: `run` returns the process's exit code. `alone`: log the last message, since
    no parent shows it to the operator."""

    def __init__(
        self,
        make_engine: Callable[[], StepEngine],
        commands: str,
        events: str,
        *,
        alone: bool = False,
    ) -> None:
        self._make_engine = make_engine
        self._alone = alone
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        # Unbounded on purpose: the front end's admission is the bound, and neither side may block.
        self._commands.set_hwm(0)
        self._events.set_hwm(0)
        self._commands.connect(commands)
        self._events.connect(events)
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._draining = False
        self._stopping = False

    def run(self) -> int:
        built = False
        try:
            with reported_to(lambda *progress: self._send(Starting(*progress))):
                engine = self._make_engine()
            built = True
            freeze_memory()
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._send(engine.ready)
            self._serve(engine)
            return EXIT_DONE
        except EngineError as error:
            if self._alone:
                logger.error("the engine stops: %s", one_line(error, None))
            self._send(Fatal(one_line(error, None), permanent=not built))
            return EXIT_UNEXPECTED if built else EXIT_CANNOT_START
        except Exception as error:
            logger.exception("the engine stops: unexpected error")
            self._send(Fatal(f"the engine failed: {type(error).__name__}: {one_line(error, None)}"))
            return EXIT_UNEXPECTED
        finally:
            self._context.destroy(linger=LINGER_MILLISECONDS)

    def _serve(self, engine: StepEngine) -> None:
        while True:
            idle = not (engine.has_work or self._draining)
            self._receive(engine, BEAT_MILLISECONDS if idle else 0)
            if self._stopping:
                return
            if engine.has_work:
                self._send(engine.step())
            elif self._draining:
                return

    def _receive(self, engine: StepEngine, wait: int) -> None:
        """Handle all queued commands. If none arrives within `wait` > 0 ms, send a heartbeat."""
        if not self._commands.poll(wait):
            if wait:
                self._send(Outputs([], engine.gauges()))
            return
        while True:
            try:
                data = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._execute(engine, self._decode(data))

    def _execute(self, engine: StepEngine, command: Command) -> None:
        match command:
            case Submit() if self._draining:
                self._send(Draining())
            case Submit():
                engine.add(command)
            case Abort():
                engine.abort(command.ids)
            case SetSpeculation() | SwapDraft():  # checked by the front end; one swap at a time
                try:
                    if isinstance(command, SwapDraft):
                        engine.swap_draft(command.draft)
                    else:
                        engine.set_speculation(command.mode, command.k)
                except EngineError as error:
                    logger.warning("speculation stays as it was: %s", one_line(error, None))
                self._send(Outputs([], engine.gauges()))  # reports it at once, also while idle
            case Drain():
                self._draining = True
            case Stop():
                self._stopping = True

    def _send(self, event: Event) -> None:
        self._events.send(self._encode(event))

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._draining = True
