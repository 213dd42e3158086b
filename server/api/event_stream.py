"""EventStream: the events of one generation on their way to one client.

Not sse-starlette's response: a lock, a deadline and a cancel scope for each event took longer than
all else that is done for a token. One task sends, one notices that the client left, one pings and
cuts a client that takes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Protocol

from sse_starlette import ServerSentEvent
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.api.intake import Call

logger = logging.getLogger(__name__)

# The name of an ASGI extension: a Writer. Each wrapper that a framework puts around `send` costs as
# much as writing.
WRITER = "foredraft.writer"
# No cache, and no proxy (nginx reads the last one), may keep an event.
HEADERS = {"cache-control": "no-store", "connection": "keep-alive", "x-accel-buffering": "no"}
PING_SECONDS = 15.0
SEND_SECONDS = 60.0  # a reader that takes nothing for so long is cut


class Writer(Protocol):
    """Writes pieces of a body that has begun, past the framework; `num_written` of them so far."""

    num_written: int

    @property
    def is_open(self) -> bool:
        """Whether the connection takes a piece now."""
        ...

    def write(self, piece: bytes) -> None: ...


class Outlet:
    """Where whole events may be written while the task that sends them sleeps: nowhere until the
    response begins, or under a server that knows no Writer."""

    def __init__(self) -> None:
        self.writer: Writer | None = None


class EventStream(StreamingResponse):
    """Of one generation, which is closed even if the stream never began. `events` are whole events
    as bytes, one or several each. While a client does not read, nothing is asked of them."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        events: AsyncGenerator[bytes, None],
        *,
        outlet: Outlet | None = None,
        ping_seconds: float = PING_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        super().__init__(events, headers={"x-request-id": call.id, **HEADERS})
        self._generation = call.generation
        self._events = events
        self._ping_seconds, self._send_seconds = ping_seconds, send_seconds
        self._outlet = Outlet() if outlet is None else outlet
        self._sent = 0  # messages that `send` has taken
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet.writer = scope.get("extensions", {}).get(WRITER)
        writing = asyncio.create_task(self._write(send))
        tasks = [
            writing,
            asyncio.create_task(until_gone(receive)),
            asyncio.create_task(self._until_stuck(send)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._generation.close()
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for event in events:
                writer = self._outlet.writer
                if writer is not None and writer.is_open:
                    writer.write(event)
                    continue
                self._sending = True
                await send(_body(event))
                self._sending = False
                self._sent += 1
            await send(_body(b"", more=False))

    @property
    def _num_sent(self) -> int:
        writer = self._outlet.writer
        return self._sent + (0 if writer is None else writer.num_written)

    async def _until_stuck(self, send: Send) -> None:
        """Pings while there is nothing to send; returns when the client has taken nothing for too
        long. A look at each ping, since a deadline for each event would cost as much as the
        event."""
        before, stuck = 0, 0.0
        while stuck < self._send_seconds:
            await asyncio.sleep(self._ping_seconds)
            if (num_sent := self._num_sent) != before:
                before, stuck = num_sent, 0.0
            elif self._sending:
                stuck += self._ping_seconds
            else:
                ping = ServerSentEvent(comment=f"ping - {datetime.now(UTC)}", sep="\n").encode()
                try:
                    async with asyncio.timeout(self._send_seconds):
                        await send(_body(ping))
                except TimeoutError:
                    break
        logger.info("cut a client that read nothing for %.0f s", self._send_seconds)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
