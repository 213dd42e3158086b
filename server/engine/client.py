"""EngineClient: the front end's only door to the engine. Owns the sockets and the open requests.

Promises: `submit` and `abort` are synchronous and never block; every stream ends exactly once, by
an Output with `finish` or by EngineLost; a slow reader costs one merged Output, never a queue.
What `hold` was called for, the next incarnation goes on with (open_requests).
Leaves to others: which incarnation to talk to, and what its state means (supervise.supervisor).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine.errors import EngineLost
from engine.messages import (
    Command,
    Drain,
    Estimates,
    Event,
    Fatal,
    Outputs,
    Ready,
    SetSpeculation,
    StepMetrics,
    Submit,
    Swap,
    SwapDraft,
    mode_refusal,
)
from server.engine.lifecycle import NOT_READY, EngineState
from server.engine.mailbox import Stream
from server.engine.open_requests import Held, OpenRequests
from server.errors import NotReady

logger = logging.getLogger(__name__)

POLLIN = int(zmq.POLLIN)  # an enumeration takes longer to compare than all of that
EVENTS_AT_ONCE = 32  # then whatever else the loop has to do


class EngineClient:
    """Speaks to one engine incarnation after the other; the supervisor says which, and sets
    `state`, `expected` (when the next one may be ready, by the monotonic clock) and `ending` (there
    will be no next one). `on_metrics` is called with every step's metrics, heartbeats included. For
    `resume_seconds` and `on_held` see OpenRequests."""

    def __init__(
        self,
        *,
        on_metrics: Callable[[StepMetrics], None] = lambda metrics: None,
        resume_seconds: float = 0.0,
        on_held: Callable[[Held, float], None] = lambda outcome, seconds: None,
    ) -> None:
        self.state: EngineState = "starting"
        self.ready: Ready | None = None  # of the present incarnation, or the last one's
        self.expected: float | None = None
        self.ending = False
        self.on_metrics = on_metrics
        self.speculation = SetSpeculation("auto")  # as last set
        self.estimates: Estimates | None = None  # as the engine last sent
        self.swap: Swap | None = None  # the last that the present incarnation told of
        self.loading = ""  # the draft that is to take the running one's place
        self._swapped: asyncio.Future[Swap] | None = None
        self._requests = OpenRequests(self.send, seconds=resume_seconds, on_held=on_held)
        self._link: _Link | None = None

    @property
    def inflight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def require_open(self) -> Ready:
        """The facts of the engine that a request may be for: of the present one or, where requests
        outlive engines, of the one before the next. Raises NotReady."""
        coming = self.state in ("starting", "lost") and self._requests.hold_seconds > 0
        if self.ready is None or not (self.state == "ready" or (coming and not self.ending)):
            raise self.not_ready()
        return self.ready

    def not_ready(self) -> NotReady:
        """Why no request is taken, and when one may be."""
        if self.ending:
            return NotReady(NOT_READY["stopped"])
        if self.ready is None or self.state not in ("starting", "lost"):
            return NotReady(NOT_READY[self.state])
        left = max(2, ceil((self.expected or 0) - time.monotonic()))
        said = f"{NOT_READY['lost']}; try again in {left} s"
        return NotReady(said, retry_seconds=left)

    def submit(self, submit: Submit) -> Stream:
        """Hand a request to the engine, or to the next one. Never blocks. Raises NotReady."""
        if waits := self.state != "ready":
            self.require_open()
        return self._requests.add(submit, waits=waits)

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests at once on this side, and abort them in the engine. Never blocks; ids
        that have ended are passed over. What the engine still sends of them is dropped."""
        self._requests.abort(ids)

    def set_speculation(self, said: SetSpeculation) -> None:
        """For this incarnation and all later ones. What is submitted after this call is served in
        that mode. The K must be one that the engine allows (messages.mode_refusal)."""
        self.speculation = said
        self.send(said)

    async def swap_draft(self, path: str) -> Swap:
        """Have this incarnation load another draft model, one at a time: whether it is refused or
        on trial. Raises EngineLost, which may be NotReady."""
        assert not self.loading
        if self.state != "ready":
            raise self.not_ready()
        self.loading, self._swapped = path, asyncio.get_running_loop().create_future()
        self.send(SwapDraft(path))
        return await asyncio.shield(self._swapped)  # whoever waits for it

    # -- for the supervisor --

    def connect(self, commands: str, events: str, *, on_event: Callable[[Event], None]) -> None:
        """Bind fresh endpoints for a new incarnation and start to pump its events. A message of
        an earlier incarnation cannot arrive: its endpoints are closed. Raises OSError."""
        assert self._link is None, "the previous incarnation is still connected"
        self._link = _Link(commands, events, lambda event: self._on_event(event, on_event))

    def disconnect(self) -> None:
        """Close this incarnation's endpoints; what was still on the way is lost."""
        if self._link is not None:
            link, self._link = self._link, None
            link.close()
        self._end_swap(EngineLost(NOT_READY["lost"]))

    def send(self, command: Command) -> None:
        """What concerns the incarnation, not a request."""
        if self._link is not None:
            self._link.send(command)

    def drain(self) -> None:
        """Have this incarnation finish what there is, and exit."""
        self._requests.hurry()
        self.send(Drain())

    def hold(self, sentence: str, *, planned: bool = False) -> int:
        """This incarnation is gone, and there will be another; see OpenRequests."""
        return self._requests.hold(sentence, planned=planned)

    def fail_all(self, sentence: str) -> None:
        """Every open stream raises EngineLost(sentence), after what had already arrived."""
        self._requests.fail(sentence)
        self._end_swap(EngineLost(sentence))

    def _on_event(self, event: Event, on_event: Callable[[Event], None]) -> None:
        match event:
            case Ready():
                self.ready, self.swap = event, None
                if mode_refusal(self.speculation, event.k_max) is not None:
                    logger.warning("this engine cannot be held at K = %d", self.speculation.k)
                    self.speculation = SetSpeculation("auto")
                if self.speculation.mode != "auto":  # ahead of all requests to this incarnation
                    self.send(self.speculation)
                self._requests.come_back(event)
            case Outputs():
                self.estimates = event.metrics.estimates
                if event.metrics.swap is not None:
                    self._end_swap(event.metrics.swap)
                self.on_metrics(event.metrics)
                # First tokens first: they count for the time to first token.
                items = sorted(event.items, key=lambda output: output.cached_tokens is None)
                self._requests.deliver(items)
        on_event(event)

    def _end_swap(self, end: Swap | EngineLost) -> None:
        waiting = self._swapped
        if isinstance(end, Swap):
            self.swap = end
            if end.outcome not in ("refused", "trial"):
                return  # of one that was answered before
            if waiting is not None:
                waiting.set_result(end)
        elif waiting is not None:
            waiting.set_exception(end)
            waiting.exception()  # nobody may wait for it any more
        self.loading, self._swapped = "", None


class _Link:
    """The two sockets of one incarnation. Commands go through zmq's asyncio, which queues them
    until the engine has connected. Events are read where the loop learns of them, since a task and
    a future for each step would cost more than all else that is done with it."""

    def __init__(self, commands: str, events: str, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Event).decode
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PULL)
        self._loop = asyncio.get_running_loop()
        self._bind(self._commands, commands)
        self._bind(self._events, events)
        self._loop.add_reader(self._events.FD, self._read)
        self._read()  # the descriptor signals changes, not a state

    def send(self, command: Command) -> None:
        # Done at once, or queued inside until the engine has connected: nothing to await.
        self._commands.send(self._encode(command))

    def close(self) -> None:
        self._stop_reading()
        self._events.close(linger=0)  # the context knows only the sockets of its own kind
        self._context.destroy(linger=0)

    def _bind(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        socket.set_hwm(0)  # the bound is admission; neither side may ever block
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot bind {endpoint}: {error}") from error

    def _read(self) -> None:
        """Everything that is there, but not more than the loop may wait for. Until there is
        nothing, since the descriptor is not signalled again for what is left."""
        try:
            for _ in range(EVENTS_AT_ONCE):
                # To ask is cheaper than a refusal.
                if self._events.closed or not int(self._events.get(zmq.EVENTS)) & POLLIN:
                    return
                self._on_event(self._decode(self._events.recv(zmq.NOBLOCK)))
            self._loop.call_soon(self._read)
        except Exception as error:  # a message or a callback of ours is wrong: say so, do not hang
            logger.exception("the engine's events are no longer read")
            self._stop_reading()
            self._on_event(Fatal(f"an event of the engine could not be handled: {error}"))

    def _stop_reading(self) -> None:
        if not self._events.closed:
            self._loop.remove_reader(self._events.FD)
