"""Server-sent events: from the deltas of one generation to the bytes that its client reads.

Not sse-starlette's response: docs/decisions.md has the measurement. One task sends, one notices
that the client left, one pings and cuts a client that takes nothing.

`[DONE]` comes only after every choice had a real finish. If the engine is lost or refuses, the
stream gets one `data: {"error": ...}` event and is closed without it. `seed` stands on the first
and the last chunk. Usage stands where `stream_options` asks for it and nowhere else, as OpenAI's:
with `include_usage` on a last chunk without choices, and a null on those before; with
`continuous_usage_stats` on all chunks, so far.
A client that leaves cancels the iterator, and whatever happens `close` aborts what is still open.
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

# No cache, and no proxy (nginx reads the last one), may keep an event.
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
PING_SECONDS = 15.0
SEND_SECONDS = 60.0  # a reader that takes nothing for so long is cut
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Of one generation, which is closed even if the stream never began. `events` are whole events
    as bytes, one or several each. While a client does not read, nothing is asked of them. `ping`:
    in place of a comment."""

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
        self._sent = 0  # messages that `send` has taken
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
        """Pings while there is nothing to send; returns when the client has taken nothing for too
        long. A look at each ping, since a deadline for each event costs as much as the event."""
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


async def chunks(
    call: Call,
    kind: str,
    choices: Callable[[Delta], list[dict[str, Any]]],
    *,
    opening: Sequence[dict[str, Any]] = (),
    first: dict[str, Any] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Chunks of the object `kind` and of one choice each; those that come together leave together.
    `choices`: of a delta. `opening`: before any text. `first`: what only the first chunk has."""
    head, generation = call.head(kind), call.generation
    seed: dict[str, Any] = {"seed": call.seed}
    extra, no_usage = {**seed, **(first or {})}, {"usage": None} if call.include_usage else {}

    def so_far() -> dict[str, Any]:
        return {"usage": usage_body(generation.usage)} if call.continuous_usage else no_usage

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any], *, last: bool = False) -> bytes:
        event = as_event({**head, "choices": choices, **usage, **extra, **(seed if last else {})})
        extra.clear()
        return event

    def events(deltas: list[Delta], usage: dict[str, Any]) -> bytes:
        found = [choice for delta in deltas for choice in choices(delta)]
        last = generation.finished and not call.include_usage
        events = [chunk([choice], usage) for choice in found[:-1]]
        events += [chunk([choice], usage, last=last) for choice in found[-1:]]
        return b"".join(events)

    scored = generation.spec.show_logprobs
    try:
        if opening:
            yield b"".join([chunk([choice], so_far()) for choice in opening])
        while not generation.finished:
            await generation.news()
            deltas, usage = generation.take(), so_far()
            if scored and many(deltas):
                told = await asyncio.to_thread(events, deltas, usage)
            else:
                told = events(deltas, usage)
            if told and not generation.finished:
                yield told
        # In one piece: who has the finish has the end.
        whole = {"usage": usage_body(generation.usage)}
        yield told + (chunk([], whole, last=True) if call.include_usage else b"") + DONE
    except Exception as error:
        yield as_event(as_logged_error(call, error).body)
    finally:
        generation.close()


def as_logged_error(call: Call, error: Exception) -> ApiError:
    """The end of a stream that was cut off."""
    if isinstance(error, EngineError):
        # What the request itself is to blame for may be said in its own words.
        own = isinstance(error, GenerationFailed) and error.bad_request
        logger.warning("%s ended with an error: %s", call.id, "of its own" if own else error)
    else:
        logger.exception("%s ended with an internal error", call.id)
    return as_api_error(error)


def as_event(data: dict[str, Any], name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, encode(data))
