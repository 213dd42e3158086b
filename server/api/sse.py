"""Server-sent events: from the deltas of one generation to the bytes that its client reads.

sse-starlette is not used: docs/decisions.md has the measurement. One task sends, one watches for a
disconnect, one sends pings and cuts off a client that stops reading.

`[DONE]` is sent only after every choice has finished. If the engine is lost or refuses the request,
the stream gets one `data: {"error": ...}` event and closes without `[DONE]`. The first and the last
chunk have `seed`. As in OpenAI's API, usage is sent only if `stream_options` asks for it: with
`include_usage` on a last chunk without choices, and null on those before; with
`continuous_usage_stats` the counts so far on every chunk.
A disconnect cancels the iterator, and in every case `close` aborts what is still running.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.errors import EngineError
from server.api.errors import ApiError, as_api_error
from server.api.gather import until_disconnect
from server.api.intake import Call
from server.api.replies import encode, many, usage_body
from server.errors import GenerationFailed
from server.generation.choice import Delta

logger = logging.getLogger(__name__)

# Neither a cache nor a proxy (the second header is nginx's) may hold back events.
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
PING_SECONDS = 15.0
SEND_SECONDS = 60.0  # a client that reads nothing for this long is cut off
DONE = b"data: [DONE]\n\n"

Choices = list[dict[str, Any]]


class EventStream(StreamingResponse):
    """Streams one generation, and closes it even if the stream never began. `events` yields one or
    several whole encoded events at a time, and is not advanced while the client does not read.
    `ping`: an encoded event to send instead of a comment."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        events: AsyncGenerator[bytes, None],
        *,
        ping: bytes | None = None,
        ping_seconds: float = PING_SECONDS,
        send_seconds: float = SEND_SECONDS,
    ) -> None:
        super().__init__(events, headers=HEADERS)
        self._generation = call.generation
        self._events = events
        self._ping = ping
        self._ping_seconds, self._send_seconds = ping_seconds, send_seconds
        self._sent = 0  # messages that `send` has accepted
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        tasks = [
            writing,
            asyncio.create_task(until_disconnect(receive)),
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
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async with aclosing(self._events) as events:
            async for event in events:
                self._sending = True
                await send(_body(event))
                self._sending = False
                self._sent += 1
        await send(_body(b"", more=False))

    async def _until_stuck(self, send: Send) -> None:
        """Send pings while there is nothing else to send; return when the client has not read for
        too long. Checked once per ping: a deadline per event would cost as much as the event."""
        before, stuck = 0, 0.0
        while stuck < self._send_seconds:
            await asyncio.sleep(self._ping_seconds)
            if self._sent != before:
                before, stuck = self._sent, 0.0
            elif self._sending:
                stuck += self._ping_seconds
            else:
                try:
                    async with asyncio.timeout(self._send_seconds):
                        ping = self._ping or f": ping - {datetime.now(UTC)}\n\n".encode()
                        await send(_body(ping))
                except TimeoutError:
                    break
        logger.info("cut a client that read nothing for %.0f s", self._send_seconds)


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class _Encoder:
    """Encodes the chunks of one stream; the arguments are those of `chunks`."""

    def __init__(
        self, call: Call, kind: str, choices: Callable[[Delta], Choices], first: dict[str, Any]
    ) -> None:
        self._call, self._head, self._choices = call, call.head(kind), choices
        self._seed: dict[str, Any] = {"seed": call.seed}
        self._extra = {**self._seed, **first}  # until the first chunk is encoded
        self._no_usage: dict[str, Any] = {"usage": None} if call.include_usage else {}

    def usage(self) -> dict[str, Any]:
        """Return the field `usage` of a chunk sent now."""
        if not self._call.continuous_usage:
            return self._no_usage
        return {"usage": usage_body(self._call.generation.usage)}

    def chunk(self, choices: Choices, usage: dict[str, Any], *, last: bool = False) -> bytes:
        more = {**self._extra, **self._seed} if last else self._extra
        event = as_event({**self._head, "choices": choices, **usage, **more})
        self._extra.clear()
        return event

    def chunks(self, deltas: list[Delta], usage: dict[str, Any]) -> bytes:
        """Return a chunk per choice of the deltas; the last may be the last of the stream."""
        found = [choice for delta in deltas for choice in self._choices(delta)]
        last = self._call.generation.finished and not self._call.include_usage
        events = [self.chunk([choice], usage) for choice in found[:-1]]
        events += [self.chunk([choice], usage, last=last) for choice in found[-1:]]
        return b"".join(events)


async def chunks(
    call: Call,
    kind: str,
    choices: Callable[[Delta], Choices],
    *,
    opening: Sequence[dict[str, Any]] = (),
    first: dict[str, Any] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield encoded chunks of the object `kind`, each with one choice. `choices` maps a delta to
    choices; `opening` are those before any text, `first` fields of the first chunk only."""
    generation, payload = call.generation, b""
    encoder = _Encoder(call, kind, choices, first or {})
    try:
        if opening:
            yield b"".join([encoder.chunk([choice], encoder.usage()) for choice in opening])
        while not generation.finished:
            await generation.wait()
            deltas, usage = generation.take(), encoder.usage()
            if generation.spec.show_logprobs and many(deltas):
                payload = await asyncio.to_thread(encoder.chunks, deltas, usage)
            else:
                payload = encoder.chunks(deltas, usage)
            if payload and not generation.finished:
                yield payload
        # Sent together, so that a client that has the finish has the end of the stream, too.
        whole = {"usage": usage_body(generation.usage)}
        yield payload + (encoder.chunk([], whole, last=True) if call.include_usage else b"") + DONE
    except Exception as error:
        yield as_event(as_logged_error(call, error).body)
    finally:
        generation.close()


def as_logged_error(call: Call, error: Exception) -> ApiError:
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
