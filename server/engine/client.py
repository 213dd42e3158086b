"""EngineClient: the front end's only access to the engine. Owns the sockets and the open requests.
Commands leave here; Outputs come back through `events` and `mailbox`.

Guarantees: `submit` and `abort` are synchronous and never block; every stream ends exactly once, by
an Output with `finish` or by EngineLost; Outputs for a slow reader are merged into one.
After `hold`, the next engine process continues the open requests (open_requests). The supervisor
(supervise.supervisor) decides which engine process to talk to and sets the state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from math import ceil

import msgspec
import zmq
import zmq.asyncio

from engine.errors import EngineLost
from engine.messages import (
    Command,
    Drain,
    Estimates,
    Event,
    Outputs,
    Ready,
    SetSpeculation,
    StepMetrics,
    Submit,
    Swap,
    SwapDraft,
    mode_refusal,
)
from server.engine.events import EventReader, bound
from server.engine.lifecycle import NOT_READY, EngineState
from server.engine.mailbox import Stream
from server.engine.open_requests import OpenRequests, ResumeOutcome
from server.errors import NotReady

logger = logging.getLogger(__name__)


class EngineClient:
    """Talks to one engine process ("incarnation") at a time. The supervisor connects it and sets
    `state`, `expected` (monotonic time at which the next one may be ready) and `ending` (there will
    be no next one). `on_metrics` gets the metrics of every step and heartbeat. `resume_seconds` and
    `on_held`: see OpenRequests."""

    def __init__(
        self,
        *,
        on_metrics: Callable[[StepMetrics], None] = lambda metrics: None,
        resume_seconds: float = 0.0,
        on_held: Callable[[ResumeOutcome, float], None] = lambda outcome, seconds: None,
    ) -> None:
        self.state: EngineState = "starting"
        self.ready: Ready | None = None  # of the current incarnation, else of the last one
        self.expected: float | None = None
        self.ending = False
        self.on_metrics = on_metrics
        self.speculation = SetSpeculation("auto")  # as last set
        self.estimates: Estimates | None = None  # as the engine last sent
        self.swap: Swap | None = None  # the last outcome from the current incarnation
        self.loading = ""  # path of the draft that is being loaded
        self._swapped: asyncio.Future[Swap] | None = None
        self._requests = OpenRequests(self.send, seconds=resume_seconds, on_held=on_held)
        self._context: zmq.asyncio.Context | None = None
        self._commands: zmq.asyncio.Socket | None = None
        self._events: EventReader | None = None
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def inflight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def require_open(self) -> Ready:
        """The Ready of the current engine or, if requests may wait for the next one, of the last
        one. Raises NotReady."""
        coming = self.state in ("starting", "lost") and self._requests.hold_seconds > 0
        if self.ready is None or not (self.state == "ready" or (coming and not self.ending)):
            raise self.not_ready()
        return self.ready

    def not_ready(self) -> NotReady:
        """Return the error that says why no request is accepted and when to retry."""
        if self.ending:
            return NotReady(NOT_READY["stopped"])
        if self.ready is None or self.state not in ("starting", "lost"):
            return NotReady(NOT_READY[self.state])
        left = max(2, ceil((self.expected or 0) - time.monotonic()))
        message = f"{NOT_READY['lost']}; try again in {left} s"
        return NotReady(message, retry_seconds=left)

    def submit(self, submit: Submit) -> Stream:
        """Send a request to this engine, or hold it for the next. Never blocks. Raises NotReady."""
        if waits := self.state != "ready":
            self.require_open()
        return self._requests.add(submit, waits=waits)

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests here at once, and abort them in the engine. Never blocks. Ids that
        have ended are ignored; later Outputs of these requests are dropped."""
        self._requests.abort(ids)

    def set_speculation(self, command: SetSpeculation) -> None:
        """Set the mode for this incarnation and all later ones; it applies to requests submitted
        after this call. K must be allowed (messages.mode_refusal)."""
        self.speculation = command
        self.send(command)

    async def swap_draft(self, path: str) -> Swap:
        """Have this incarnation load another draft model, one at a time. Return the Swap once the
        draft is refused or on trial. Raises EngineLost, including NotReady."""
        assert not self.loading
        if self.state != "ready":
            raise self.not_ready()
        self.loading, self._swapped = path, asyncio.get_running_loop().create_future()
        self.send(SwapDraft(path))
        return await asyncio.shield(self._swapped)  # survives a cancelled caller

    # -- for the supervisor --

    def connect(self, commands: str, events: str, *, on_event: Callable[[Event], None]) -> None:
        """Bind the endpoints of a new incarnation and start reading its events. No message of an
        earlier incarnation can arrive, since its endpoints are closed. Raises OSError; then, too,
        `disconnect` is needed."""
        assert self._context is None, "the previous incarnation is still connected"
        context = self._context = zmq.asyncio.Context()
        self._commands = bound(context.socket(zmq.PUSH), commands)
        reader = bound(zmq.Socket(context, zmq.PULL), events)
        self._events = EventReader(
            reader, self._requests, lambda event: self._on_event(event, on_event)
        )

    def disconnect(self) -> None:
        """Close this incarnation's endpoints; messages in transit are lost."""
        if self._events is not None:
            self._events.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = self._commands = self._events = None
        self._end_swap(EngineLost(NOT_READY["lost"]))

    def send(self, command: Command) -> None:
        """Send a command; dropped if no incarnation is connected."""
        if self._commands is not None:
            # Sent at once, or queued by zmq's asyncio socket until the engine has connected.
            self._commands.send(self._encode(command))

    def drain(self) -> None:
        """Have this incarnation finish all requests and exit."""
        self._requests.submit_all()
        self.send(Drain())

    def hold(self, sentence: str, *, planned: bool = False) -> int:
        """The incarnation is gone and another will follow; see OpenRequests."""
        return self._requests.hold(sentence, planned=planned)

    def fail_all(self, sentence: str) -> None:
        """End every open stream with EngineLost(sentence), after the Outputs that have arrived."""
        self._requests.fail(sentence)
        self._end_swap(EngineLost(sentence))

    def _on_event(self, event: Event, on_event: Callable[[Event], None]) -> None:
        match event:
            case Ready():
                self.ready, self.swap = event, None
                if mode_refusal(self.speculation, event.k_max) is not None:
                    logger.warning("this engine cannot be held at K = %d", self.speculation.k)
                    self.speculation = SetSpeculation("auto")
                if self.speculation.mode != "auto":  # before any request to this incarnation
                    self.send(self.speculation)
                self._requests.resume_on(event)
            case Outputs():
                self.estimates = event.metrics.estimates
                if event.metrics.swap is not None:
                    self._end_swap(event.metrics.swap)
                self.on_metrics(event.metrics)
        on_event(event)

    def _end_swap(self, end: Swap | EngineLost) -> None:
        waiting = self._swapped
        if isinstance(end, Swap):
            self.swap = end
            if end.outcome not in ("refused", "trial"):
                return  # the end of a trial; `swap_draft` has already returned
            if waiting is not None:
                waiting.set_result(end)
        elif waiting is not None:
            waiting.set_exception(end)
            waiting.exception()  # mark it as retrieved: the caller may be gone
        self.loading, self._swapped = "", None
