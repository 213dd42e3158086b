"""Sender: ASGI's `send`, which writes a reply to its connection's transport."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import RequestResponseCycle

LINGER_SECONDS = 10.0  # how long the rest of a request is read and dropped before closing


class Sender:
    """Writes chunks of a chunked body directly to the transport: h11 would take longer for a chunk
    than everything else on its path. The end of a response first waits for the rest of the
    request's body: closing earlier would reset the connection. If LINGER_SECONDS are too short for
    it, the connection closes."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle: Any = cycle
        self._in_chunks = False

    async def __call__(self, message: Any) -> None:
        cycle, more = self._cycle, message.get("more_body")
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_known = b"content-length" in names or cycle.scope["method"] == "HEAD"
            self._in_chunks = cycle.scope["http_version"] == "1.1" and not is_known
            await cycle.send(message)
        elif more and self._in_chunks and message["body"]:
            if cycle.flow.write_paused:
                await cycle.flow.drain()
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
