"""Server-sent events: from the deltas of one generation to the bytes that its client reads.

sse-starlette is not used: docs/decisions.md has the measurement. One task sends, one watches for a
disconnect, one sends pings. `server.connection` cuts off a client that stops reading.

If the engine is lost or refuses the request, the stream ends with an error (`EventWriter.fail`).
A disconnect cancels the iterator, and in every case `close` aborts what is still running.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.errors import EngineError
from server.api.errors import ApiError, as_api_error
from server.api.gather import until_disconnect
from server.api.intake import Call
from server.api.replies import encode
from server.errors import GenerationFailed
from server.generation.choice import Delta

logger = logging.getLogger(__name__)

# Neither a cache nor a proxy (the second header is nginx's) may hold back events.
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
PING_SECONDS = 15.0
DONE = b"data: [DONE]\n\n"


class EventWriter(Protocol):
    """Encodes a reply as whole events, or b"" for none: `begin` before there is any output of the
    engine, `fail` in place of `end` if the generation failed."""

    def begin(self) -> bytes: ...
    async def feed(self, deltas: list[Delta]) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, error: ApiError) -> bytes: ...


class EventStream(StreamingResponse):
    """Streams one generation, and closes it even if the stream never began. While the client does
    not read, nothing is encoded. `ping`: an encoded event to send instead of a comment."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        writer: EventWriter,
        *,
        ping: bytes | None = None,
        ping_seconds: float = PING_SECONDS,
    ) -> None:
        self._events = events(call, writer)
        super().__init__(self._events, headers=HEADERS)
        self._generation = call.generation
        self._ping = ping
        self._ping_seconds = ping_seconds
        self._sent = 0  # payloads
        self._turn = asyncio.Lock()  # so that no ping that waits for a reader comes after the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        tasks = [
            writing,
            asyncio.create_task(until_disconnect(receive)),
            asyncio.create_task(self._ping_while_silent(send)),
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
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async with aclosing(self._events) as payloads:
            async for payload in payloads:
                async with self._turn:
                    await send(_body(payload))
                self._sent += 1
        async with self._turn:
            await send(_body(b"", more=False))

    async def _ping_while_silent(self, send: Send) -> None:
        before = 0
        while True:
            await asyncio.sleep(self._ping_seconds)
            if self._sent == before and not self._turn.locked():
                async with self._turn:
                    await send(_body(self._ping or f": ping - {datetime.now(UTC)}\n\n".encode()))
            before = self._sent


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def events(call: Call, writer: EventWriter) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events of a generation, those of each read together."""
    generation = call.generation
    try:
        payload = writer.begin()
        while not generation.finished:
            if payload:
                yield payload
            payload = await writer.feed(await generation.read())
        # Sent together, so that a client that has the finish has the end of the stream, too.
        yield payload + writer.end()
    except Exception as error:
        yield writer.fail(_as_logged_error(call, error))
    finally:
        generation.close()


def _as_logged_error(call: Call, error: Exception) -> ApiError:
    """Log the error that ended a stream, and return it as an ApiError."""
    if isinstance(error, EngineError):
        # The message of an error that the request caused may quote it, so it is not logged.
        own = isinstance(error, GenerationFailed) and error.bad_request
        logger.warning(
            "%s ended with an error: %s", call.id, "caused by the request" if own else error
        )
    else:
        logger.exception("%s ended with an internal error", call.id)
    return as_api_error(error)


def as_event(data: dict[str, Any], name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, encode(data))


def as_events(events: Iterable[dict[str, Any]]) -> bytes:
    """Encode events that are named by their `type`."""
    return b"".join([as_event(event, event["type"]) for event in events])
