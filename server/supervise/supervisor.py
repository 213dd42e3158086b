"""EngineSupervisor: keeps one engine process alive behind an EngineClient.

Owns the child process, its private endpoints and its states (engine.lifecycle decides, this acts).
Guarantees: a dead, failing or silent engine is restarted after a back-off, and open streams
continue on the new one or end with an error; `replace` switches to an engine of another
configuration, and back if that one cannot start; `stop` leaves neither a process nor a file.
Others handle requests (server.engine.client) and the exit code after a failure (server.serve).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import EXIT_CANNOT_START
from engine.messages import Draining, Event, Fatal, Ready, Starting, Stop
from server.config import Config
from server.engine.client import EngineClient
from server.engine.lifecycle import NOT_READY, EngineState, Lifecycle, Loss
from server.supervise.incarnation import Incarnation, how_it_ended

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "engine")
WATCH_TICKS = 4  # checks per `watchdog_seconds`; a ready engine sends a heartbeat every second
FINAL_EVENTS_SECONDS = 2.0  # to wait for events that a process sent just before it ended
STOP_SECONDS = 2.0  # for an engine to exit by itself after Stop


class EngineSupervisor:
    """Usage: `start()` once, in a running loop; `stop(grace)` at the end. If the engine fails for
    good, `failure` holds the reason for the operator."""

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        on_state: Callable[[EngineState], None],
        on_starting: Callable[[Starting], None] = lambda starting: None,
    ) -> None:
        self._settings = config.server
        self._engine = config.engine
        self._before: EngineConfig | None = None  # to return to if the present one cannot start
        self._next: EngineConfig | None = None  # set by `replace`
        self._replace = asyncio.Event()
        self._serving = asyncio.Event()
        self._client = client
        self._command = tuple(command)
        self._on_state = on_state
        self._on_starting = on_starting
        self._lifecycle = Lifecycle(config.server, self._changed)
        self._incarnation: Incarnation | None = None
        self._start_seconds: float | None = None  # of the last one that became ready
        self._measured = b""  # step costs measured by an engine of the present configuration
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._hurry = asyncio.Event()
        # Events, not cancellation: a cancelled clean-up would leave a process or a folder behind.
        self._end = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def failure(self) -> str | None:
        """Why the engine failed for good: in its own words if it sent any."""
        return self._lifecycle.failure

    @property
    def pid(self) -> int | None:
        """The process id of the present engine; None if there is none."""
        return self._incarnation.pid if self._incarnation is not None else None

    async def start(self) -> None:
        """Start the engine in the background; watch `state` or `on_state`."""
        assert self._task is None, "start() is called once"
        self._changed(self.state)
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    def replace(self, config: EngineConfig) -> None:
        """Replace the engine with one of this configuration, which continues the streams. If an
        engine is starting, it is replaced once it is ready. The target must be the same."""
        if not self._stopping:
            self._next = config
            self._replace.set()

    async def stop(self, grace: float) -> None:
        """Accept no new requests; those still running after `grace` seconds end with an error.
        Returns when the process and its files are gone. A second call ends the grace period."""
        if self._stopping:
            self._hurry.set()
        else:
            self._stopping = self._client.ending = True
            self._replace.clear()
            await self._drain(time.monotonic() + grace)
            self._end.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._client.fail_all(NOT_READY["stopped"])
        if self.state not in ("failed", "stopped"):
            self._lifecycle.stop()

    async def _drain(self, deadline: float) -> None:
        if self.state in ("starting", "lost") and self._client.inflight:  # held requests may resume
            wait = deadline - time.monotonic()
            await _within(wait, self._serving, self._finished, self._hurry)
        if self.state == "ready":
            self._lifecycle.drain()
            self._client.drain()
            await self._finish(max(deadline - time.monotonic(), 0.0))

    async def _finish(self, grace: float) -> None:
        """Wait for the draining engine to exit; after `grace` seconds fail what still runs."""
        await _within(grace, self._finished, self._hurry)
        if not self._finished.is_set():
            self._client.fail_all("the server is shutting down; the grace period is over")
            self._client.send(Stop())
            await _within(STOP_SECONDS, self._finished)

    # -- one incarnation after the other --

    async def _supervise(self) -> None:
        try:
            while (delay := await self._live()) is not None:
                if await _within(delay, self._end):
                    return
                if self.state == "lost":
                    self._lifecycle.restart()
        except Exception as error:  # else a bug here would look like an engine that never starts
            logger.exception("the supervisor stops: unexpected error")
            sentence = f"the server failed: {type(error).__name__}: {error}"
            self._lifecycle.fail(sentence, why=sentence)
            self._client.fail_all(sentence)
        finally:
            self._finished.set()

    async def _live(self) -> float | None:
        """Run one incarnation. Return the seconds until the next one; None: there is none."""
        self._incarnation = incarnation = Incarnation()
        try:
            loss = await self._run(incarnation)
            self._serving.clear()
            if loss is None:
                return await self._replaced(incarnation)
            if self._before is not None:  # a replacement that never served
                logger.error("the configuration before comes back: %s", loss.sentence)
                self._engine, self._before = self._before, None
                return self._expect_after(0.0)
            return self._lost(loss)
        finally:
            self._incarnation = None
            self._client.disconnect()
            await incarnation.close()

    def _lost(self, loss: Loss) -> float | None:
        """Hold or fail the streams, before the process is killed. Return as `_live`."""
        if self.state == "draining":
            self._client.fail_all(loss.sentence)
            return None
        explained = self._client.hold(loss.sentence)
        delay = self._lifecycle.lose(loss, time.monotonic(), explained)
        # The requests may be what crashes the engine, so the last restart begins without them.
        if delay is None or self._lifecycle.has_last_try:
            self._client.fail_all(loss.sentence)
        return delay if delay is None else self._expect_after(delay)

    def _expect_after(self, delay: float) -> float:
        """Tell the client when to expect the next engine, from the last start. Returns `delay`."""
        if self._start_seconds is not None:
            self._client.expected = time.monotonic() + delay + self._start_seconds
        return delay

    async def _replaced(self, incarnation: Incarnation) -> float | None:
        """Stop the incarnation in favour of one with the wanted configuration. Return the seconds
        until that starts; None: no replacement, as the supervisor stops."""
        if self._next is None or self._end.is_set():
            return None
        self._replace.clear()
        self._measured = b""
        self._before, self._engine, self._next = self._engine, self._next, None
        self._lifecycle.replace()
        self._expect_after(0.0)
        self._client.send(Stop())
        await _within(STOP_SECONDS, incarnation.over)
        self._client.hold("the engine was replaced", planned=True)
        return 0.0

    async def _run(self, incarnation: Incarnation) -> Loss | None:
        """Spawn, and watch until it exits, sends Fatal or goes silent. None: `stop`, `replace`."""
        try:
            self._client.connect(
                incarnation.commands,
                incarnation.events,
                on_event=lambda event: self._on_event(event, incarnation),
            )
            self._spawned = time.monotonic()
            await incarnation.spawn(self._command, self._engine, self._measured)
        except OSError as error:
            return Loss(f"the engine process could not be started: {error}")
        silence = await self._watch(incarnation)
        if silence is not None or not incarnation.over.is_set():
            return silence
        return await self._final_loss(incarnation)

    def _on_event(self, event: Event, incarnation: Incarnation) -> None:
        incarnation.seen = True
        match event:
            case Starting():
                self._on_starting(event)
            case Ready() if not self._end.is_set():
                self._before, now = None, time.monotonic()
                self._start_seconds, self._measured = now - self._spawned, event.measured
                self._lifecycle.ready(now)
                self._serving.set()
                incarnation.ready.set()
            case Draining():
                self.replace(self._engine)
            case Fatal():
                incarnation.fatal = event
                incarnation.over.set()

    async def _watch(self, incarnation: Incarnation) -> Loss | None:
        """Return None when it is over or when `stop` or `replace` is called; a Loss if it goes
        silent or does not become ready in time."""
        if (loss := await self._watch_start(incarnation)) is not None:
            return loss
        settings, over = self._settings, incarnation.over
        # Count checks, not seconds: while this loop is blocked, it reads no events either. Skip
        # checks during which the engine mostly waited for a CPU.
        silent, tick = 0, settings.watchdog_seconds / WATCH_TICKS
        while not await _within(tick, over, self._end, self._replace):
            if incarnation.cpu_wait() < tick / 2:
                silent = 0 if incarnation.seen else silent + 1
            incarnation.seen = False
            if silent >= WATCH_TICKS:
                return Loss(f"the engine did not respond for {settings.watchdog_seconds:g} s")
        return None

    async def _watch_start(self, incarnation: Incarnation) -> Loss | None:
        """Return None when it is ready or over, or when `stop` is called; a Loss after the start
        timeout or if SIGSTOP holds it. Silence does not count: loading may send no events."""
        settings = self._settings
        deadline = time.monotonic() + settings.start_timeout_seconds
        held, tick = 0, settings.watchdog_seconds / WATCH_TICKS
        while not await _within(
            min(tick, max(deadline - time.monotonic(), 0.0)),
            incarnation.ready, incarnation.over, self._end,
        ):  # fmt: skip
            held = held + 1 if incarnation.is_stopped() else 0
            if held >= WATCH_TICKS:
                return Loss(f"a signal held the engine for {settings.watchdog_seconds:g} s")
            if time.monotonic() >= deadline:
                return Loss(f"the engine was not ready within {settings.start_timeout_seconds:g} s")
        return None

    async def _final_loss(self, incarnation: Incarnation) -> Loss:
        """Return why it ended. Its last events may still be in transit, and a Fatal holds the
        reason; a process with torch may take seconds to exit after sending it."""
        deadline = time.monotonic() + FINAL_EVENTS_SECONDS
        while incarnation.fatal is None and time.monotonic() < deadline:
            code = incarnation.exit_code
            if code is not None and (code < 0 or (code == 0 and self._client.inflight == 0)):
                break
            await asyncio.sleep(0.01)
        if (fatal := incarnation.fatal) is not None:
            return Loss(fatal.message, permanent=fatal.permanent)
        code = incarnation.exit_code
        sentence = how_it_ended(code) if code is not None else "the engine ended"
        return Loss(sentence, permanent=code == EXIT_CANNOT_START)

    def _changed(self, state: EngineState) -> None:
        self._client.state = state
        self._on_state(state)


async def _within(seconds: float, *events: asyncio.Event) -> bool:
    """Whether one of the events was set within `seconds`; returns as soon as one is."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
