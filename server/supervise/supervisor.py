"""EngineSupervisor: keeps one engine process alive behind an EngineClient.

Owns the child, its private endpoints and its states (engine.lifecycle decides, this acts).
Promises: a dead, failing or silent engine is started again after a back-off, and open streams go on
with the new one or end with a sentence; `replace` puts an engine of another configuration in the
present one's place, or that one again where it cannot start; `stop` leaves neither a process nor a
file. Leaves to others: requests (server.engine.client), and what to do when it has failed (exit
non-zero: the cli).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import EXIT_CANNOT_START
from engine.messages import Event, Leaving, Ready, Starting, Stop
from server.config import Config
from server.engine.client import EngineClient
from server.engine.lifecycle import NOT_READY, EngineState, Lifecycle, Loss
from server.supervise.incarnation import Incarnation, how_it_ended

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "engine")
WATCH_TICKS = 4  # checks within `watchdog_seconds`; an engine that is ready beats once a second
FINAL_EVENTS_SECONDS = 2.0  # for what a process sent just before it ended
STOP_SECONDS = 2.0  # for an engine to end by itself once everything is aborted


class EngineSupervisor:
    """`start()` once, in a running loop; `stop(grace)` at the end. When the engine is given up,
    `failure` holds the sentence for the operator."""

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
        self._before: EngineConfig | None = None  # where the present one has yet to prove itself
        self._wanted: EngineConfig | None = None  # by `replace`
        self._replace = asyncio.Event()
        self._serving = asyncio.Event()
        self._client = client
        self._command = tuple(command)
        self._on_state = on_state
        self._on_starting = on_starting
        self._lifecycle = Lifecycle(config.server, self._changed)
        self._incarnation: Incarnation | None = None
        self._start_seconds: float | None = None  # of the last one that got ready
        self._measured = b""  # by one of the present configuration
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._hurry = asyncio.Event()
        # Set, never cancelled: a cancelled clean-up would leave a process or a folder behind.
        self._end = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def failure(self) -> str | None:
        """Why the engine was given up: in its own words, if it had any."""
        return self._lifecycle.failure

    @property
    def pid(self) -> int | None:
        """Of the present engine process, if there is one."""
        return self._incarnation.pid if self._incarnation is not None else None

    async def start(self) -> None:
        """Begin to start the engine and return; watch `state` or `on_state`."""
        assert self._task is None, "start() is called once"
        self._changed(self.state)
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    def replace(self, config: EngineConfig) -> None:
        """Have an engine of this configuration go on with the streams, as soon as one is ready that
        could be replaced. The target must be the same."""
        if not self._stopping:
            self._wanted = config
            self._replace.set()

    async def stop(self, grace: float) -> None:
        """No new requests; running ones have `grace` seconds, then each ends with a sentence.
        Returns when the process and its files are gone. A second call cuts the grace short."""
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
        if self.state in ("starting", "lost") and self._client.inflight:  # what is held goes on
            wait = deadline - time.monotonic()
            await _within(wait, self._serving, self._finished, self._hurry)
        if self.state == "ready":
            self._lifecycle.drain()
            self._client.drain()
            await self._finish(max(deadline - time.monotonic(), 0.0))

    async def _finish(self, grace: float) -> None:
        """Wait for the drained engine to exit; after `grace` seconds cut what still runs."""
        await _within(grace, self._finished, self._hurry)
        if not self._finished.is_set():
            self._client.fail_all("the server is shutting down and waits no longer for requests")
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
        except Exception as error:  # a bug of ours must not look like an engine that is starting
            logger.exception("the supervisor stops: unexpected error")
            sentence = f"the server failed: {type(error).__name__}: {error}"
            self._lifecycle.fail(sentence, why=sentence)
            self._client.fail_all(sentence)
        finally:
            self._finished.set()

    async def _live(self) -> float | None:
        """The life of one incarnation. Returns seconds until the next, or None: no more."""
        self._incarnation = incarnation = Incarnation()
        try:
            loss = await self._run(incarnation)
            self._serving.clear()
            if loss is None:
                return await self._replaced(incarnation)
            if self._before is not None:  # and this one never served
                logger.error("the configuration before comes back: %s", loss.sentence)
                self._engine, self._before = self._before, None
                return self._expect_after(0.0)
            return self._lost(loss)
        finally:
            self._incarnation = None
            self._client.disconnect()
            await incarnation.close()

    def _lost(self, loss: Loss) -> float | None:
        """Streams are told or held first, before the process is killed and its folder removed."""
        if self.state == "draining":
            self._client.fail_all(loss.sentence)
            return None
        explained = self._client.hold(loss.sentence)
        delay = self._lifecycle.lose(loss, time.monotonic(), explained)
        # Whatever kills the engine again and again must not come along to its last try.
        if delay is None or self._lifecycle.has_last_try:
            self._client.fail_all(loss.sentence)
        return delay if delay is None else self._expect_after(delay)

    def _expect_after(self, delay: float) -> float:
        """Of the next start, as long as the last one took. Returns `delay`."""
        if self._start_seconds is not None:
            self._client.expected = time.monotonic() + delay + self._start_seconds
        return delay

    async def _replaced(self, incarnation: Incarnation) -> float | None:
        """By an engine of the configuration that is wanted; None: it is the end."""
        if self._wanted is None or self._end.is_set():
            return None
        self._replace.clear()
        self._measured = b""
        self._before, self._engine, self._wanted = self._engine, self._wanted, None
        self._lifecycle.replace()
        self._expect_after(0.0)
        self._client.send(Stop())
        await _within(STOP_SECONDS, incarnation.over)
        self._client.hold("the engine was replaced", planned=True)
        return 0.0

    async def _run(self, incarnation: Incarnation) -> Loss | None:
        """Spawn, and watch until it is over: exit, Fatal, silence; or `stop`: then None."""
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
        if isinstance(event, Starting):
            self._on_starting(event)
        if isinstance(event, Ready):
            if self._end.is_set():
                return
            self._before, now = None, time.monotonic()
            self._start_seconds, self._measured = now - self._spawned, event.measured
            self._lifecycle.ready(now)
            self._serving.set()
        if isinstance(event, Leaving):
            self.replace(self._engine)
        incarnation.receive(event)

    async def _watch(self, incarnation: Incarnation) -> Loss | None:
        """None when it is over, or when `stop` or `replace` is called; a Loss when it sends
        nothing."""
        if (loss := await self._watch_start(incarnation)) is not None:
            return loss
        settings, over = self._settings, incarnation.over
        # Checks are counted, not seconds: when this loop is held up, it reads no events either. One
        # in which the engine waited for a CPU most of the time says nothing of the engine.
        silent, tick = 0, settings.watchdog_seconds / WATCH_TICKS
        while not await _within(tick, over, self._end, self._replace):
            if incarnation.cpu_wait() < tick / 2:
                silent = 0 if incarnation.seen else silent + 1
            incarnation.seen = False
            if silent >= WATCH_TICKS:
                return Loss(f"the engine gave no sign of life for {settings.watchdog_seconds:g} s")
        return None

    async def _watch_start(self, incarnation: Incarnation) -> Loss | None:
        """None when it is ready or over, or when `stop` is called. An engine that loads may send
        nothing for long, so only time counts, and that no signal (SIGSTOP) holds it."""
        settings = self._settings
        deadline = time.monotonic() + settings.start_timeout_seconds
        held, tick = 0, settings.watchdog_seconds / WATCH_TICKS
        while not await _within(
            min(tick, max(deadline - time.monotonic(), 0.0)),
            incarnation.ready, incarnation.over, self._end,
        ):  # fmt: skip
            held = held + 1 if incarnation.is_held() else 0
            if held >= WATCH_TICKS:
                return Loss(f"a signal held the engine for {settings.watchdog_seconds:g} s")
            if time.monotonic() >= deadline:
                return Loss(f"the engine was not ready within {settings.start_timeout_seconds:g} s")
        return None

    async def _final_loss(self, incarnation: Incarnation) -> Loss:
        """What was sent before the end may still be on the way. A Fatal holds the reason; an
        interpreter with torch in it may take seconds to exit after that."""
        deadline = time.monotonic() + FINAL_EVENTS_SECONDS
        while incarnation.fatal is None and time.monotonic() < deadline:
            code = incarnation.exit_code
            if code is not None and (code < 0 or (code == 0 and self._client.inflight == 0)):
                break
            await asyncio.sleep(0.01)
        if (fatal := incarnation.fatal) is not None:
            return Loss(fatal.message, useless_to_retry=fatal.useless_to_retry)
        code = incarnation.exit_code
        sentence = how_it_ended(code) if code is not None else "the engine ended"
        return Loss(sentence, useless_to_retry=code == EXIT_CANNOT_START)

    def _changed(self, state: EngineState) -> None:
        self._client.state = state
        self._on_state(state)


async def _within(seconds: float, *events: asyncio.Event) -> bool:
    """Whether one of the events was set within so many seconds; returns as soon as one is."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
