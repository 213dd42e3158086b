"""EventStream: the events of one generation on their way to one client.

sse-starlette's response with the inside of its `__call__` replaced: a lock, a deadline and a cancel
scope for each event took longer than all else that is done for a token. One task sends, one notices
that the client left, one pings and cuts a client that takes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from server.api.intake import Call

logger = logging.getLogger(__name__)

# The name of an ASGI extension: a function that writes a piece of a body that has begun, if the
# connection can take it at once. Each wrapper that a framework puts around `send` costs as much.
WRITE = "foretoken.write"
PING_SECONDS = 15.0
SEND_SECONDS = 60.0  # a reader that takes nothing for so long is cut


class EventStream(EventSourceResponse):
    """Of one generation, which is closed even if the stream never began. `events` are whole events
    as bytes, one or several each. While a client does not read, nothing is asked of them."""

    def __init__(
        self,
        call: Call,
        events: AsyncGenerator[bytes, None],
        *,
        ping_seconds: float = PING_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        super().__init__(events, headers={"x-request-id": call.id})
        self._generation = call.generation
        self._events = events
        self._ping_seconds, self._send_seconds = ping_seconds, send_seconds
        self._sent = 0  # messages that the connection has taken
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = scope.get("extensions", {}).get(WRITE, _never)
        writing = asyncio.create_task(self._write(send, write))
        tasks = [
            writing,
            asyncio.create_task(_until_gone(receive)),
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

    async def _write(self, send: Send, write: Callable[[bytes], bool]) -> None:
        async with aclosing(self._events) as events:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for event in events:
                if not write(event):
                    self._sending = True
                    await send(_body(event))
                    self._sending = False
                self._sent += 1
            await send(_body(b"", more=False))

    async def _until_stuck(self, send: Send) -> None:
        """Pings while there is nothing to send; returns when the client has taken nothing for too
        long. A look at each ping, since a deadline for each event would cost as much as the
        event."""
        before, stuck = 0, 0.0
        while stuck < self._send_seconds:
            await asyncio.sleep(self._ping_seconds)
            if self._sent != before:
                before, stuck = self._sent, 0.0
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


def _never(event: bytes) -> bool:
    """For servers that are not `server.connection`."""
    return False


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
