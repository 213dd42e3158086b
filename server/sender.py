"""Sender: ASGI's `send`, which writes a reply to its connection's transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0  # how long the rest of a request is read and dropped before closing


class Sender:
    """Writes chunks of a chunked body directly to the transport: h11 would take longer for a chunk
    than everything else on its path. The end of a response first waits for the rest of the
    request's body: closing earlier would reset the connection. If LINGER_SECONDS are too short for
    it, the connection closes. Calls `cut` if the client reads nothing for `unread_seconds` while
    more is to be written."""

    def __init__(self, cycle: Any, cut: Callable[[], None], unread_seconds: float) -> None:
        self._cycle = cycle  # uvicorn's RequestResponseCycle
        self._cut, self._unread_seconds = cut, unread_seconds
        self._in_chunks = False

    async def __call__(self, message: Any) -> None:
        cycle, more = self._cycle, message.get("more_body")
        await self._drain()
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_known = b"content-length" in names or cycle.scope["method"] == "HEAD"
            self._in_chunks = cycle.scope["http_version"] == "1.1" and not is_known
            await cycle.send(message)
        elif more and self._in_chunks and message["body"]:
            if not cycle.disconnected:
                body = message["body"]
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif not more and cycle.more_body:
            await cycle.send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while (await cycle.receive()).get("more_body"):
                        pass
            cycle.keep_alive &= not cycle.more_body
            await cycle.send({"type": "http.response.body", "body": b""})
        else:
            await cycle.send(message)

    async def _drain(self) -> None:
        """Wait until the transport may be written to, or the client has gone or was cut off."""
        cycle = self._cycle
        while cycle.flow.write_paused and not cycle.disconnected:
            unread = cycle.transport.get_write_buffer_size()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._unread_seconds):
                    await cycle.flow.drain()
            if cycle.flow.write_paused and cycle.transport.get_write_buffer_size() == unread:
                logger.info("cut a client that read nothing for %.0f s", self._unread_seconds)
                self._cut()
