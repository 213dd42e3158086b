"""EventReader: reads the events of one engine process from their socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

from engine.messages import Event, Fatal, Outputs
from server.engine.mailbox import Mailboxes

logger = logging.getLogger(__name__)

POLLIN = int(zmq.POLLIN)  # comparing an enum member would take longer than reading
EVENTS_AT_ONCE = 32  # read before other callbacks of the event loop get their turn
S = TypeVar("S", bound=zmq.Socket[Any])


def bound(socket: S, endpoint: str) -> S:
    """Bind a socket and return it; it is closed if that fails. Raises OSError."""
    socket.set_hwm(0)  # unbounded: admission is the bound; neither side may block
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(error.errno, f"cannot bind {endpoint}: {error}") from error
    return socket


class EventReader:
    """Delivers Outputs to `mailboxes`, then passes each event on. Events are read in a callback of
    the event loop, since a task and a future per step would cost more than all other work on a
    step."""

    def __init__(
        self, socket: zmq.Socket[bytes], mailboxes: Mailboxes, on_event: Callable[[Event], None]
    ) -> None:
        self._socket = socket
        self._mailboxes = mailboxes
        self._on_event = on_event
        self._decode = msgspec.msgpack.Decoder(Event).decode
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._read)
        self._read()  # the descriptor is edge-triggered

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger=0)

    def _read(self) -> None:
        """Read events until there are none, since the descriptor is not signalled again for the
        rest; after EVENTS_AT_ONCE, let the event loop run first."""
        try:
            for _ in range(EVENTS_AT_ONCE):
                # Polling is cheaper than an exception from recv.
                if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & POLLIN:
                    return
                event = self._decode(self._socket.recv(zmq.NOBLOCK))
                if isinstance(event, Outputs):
                    self._mailboxes.deliver(event.items)
                self._on_event(event)
            self._loop.call_soon(self._read)
        except Exception as error:  # a bug here or in a callback must not leave requests hanging
            logger.exception("the engine's events are no longer read")
            self.close()
            self._on_event(Fatal(f"an event from the engine could not be processed: {error}"))
