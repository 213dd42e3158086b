"""Server-sent events: from the deltas of one generation to the bytes that its client reads.

Not sse-starlette's response: a lock, a deadline and a cancel scope for each event took longer than
all else that is done for a token. Here one task sends, one notices that the client left, one pings
and cuts a client that takes nothing.

`[DONE]` comes only after every choice had a real finish. If the engine is lost or refuses, the
stream gets one `data: {"error": ...}` event and is closed without it. `seed` stands on the first
and the last chunk; the last chunk (with `include_usage` the one without choices) has the usage.
A client that leaves cancels the iterator, and whatever happens `close` aborts what is still open.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from json.encoder import encode_basestring as quote  # which json.dumps comes to
from typing import Any, Protocol

from sse_starlette import ServerSentEvent
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.errors import EngineError
from server.api.errors import as_api_error
from server.api.intake import Call, until_gone
from server.api.replies import usage_body
from server.generation.choice import Delta

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


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ChunkShape(Protocol):
    """How one endpoint writes its chunks."""

    kind: str  # the chunk's `object`

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Choices sent before any text."""
        ...

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk's choice each; at least one when the delta has a finish."""
        ...

    def around(self, index: int) -> tuple[str, str] | None:
        """The JSON before and after the text in what `choices` says of a delta that has a text and
        nothing else; None where it takes more than that to know."""
        ...


class GenerationStream(EventStream):
    """The stream of one generation in chunks. `first`: what the first one says besides the seed."""

    def __init__(
        self, call: Call, shape: ChunkShape, *, first: Mapping[str, Any] | None = None
    ) -> None:
        outlet = Outlet()
        super().__init__(call, events(call, shape, first or {}, outlet), outlet=outlet)


async def events(
    call: Call, shape: ChunkShape, first: Mapping[str, Any], outlet: Outlet
) -> AsyncGenerator[bytes, None]:
    """One or several whole events each: what came together leaves together. Most of them go to the
    outlet, and those that it does not take are yielded."""
    chunks, generation = _Chunks(call, shape, {"seed": call.seed, **first}), call.generation

    def pass_on() -> bool:
        writer = outlet.writer
        if writer is None or not writer.is_open:
            return False
        if piece := chunks.of(generation.take()):
            writer.write(piece)
        return not generation.finished

    try:
        if opening := chunks.opening():
            yield opening
        while not generation.finished:
            await generation.news(pass_on)
            if piece := chunks.of(generation.take()):
                yield piece
        yield chunks.ending() + DONE
    except EngineError as error:
        logger.warning("%s ended with an error: %s", call.id, error)
        yield as_event(as_api_error(error).body)
    except Exception as error:
        logger.exception("%s ended with an internal error", call.id)
        yield as_event(as_api_error(error).body)
    finally:
        generation.close()


class _Chunks:
    """The events of one call. Most chunks say a few characters and nothing else: all but those is
    written once."""

    def __init__(self, call: Call, shape: ChunkShape, first: dict[str, Any]) -> None:
        self._call = call
        self._shape = shape
        self._head = call.head(shape.kind)
        self._common: dict[str, Any] = {"usage": None} if call.include_usage else {}
        self._first = first
        self._around = [self._written(choice.index) for choice in call.generation.choices]

    def opening(self) -> bytes:
        choices = self._shape.opening(len(self._call.generation.choices))
        return b"".join([self._chunk(choice) for choice in choices])

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._spliced(d) or self._full(d, d is deltas[-1]) for d in deltas])

    def ending(self) -> bytes:
        if not self._call.include_usage:
            return b""
        usage = usage_body(self._call.generation.usage)
        return as_event({**self._head, "choices": [], "usage": usage, "seed": self._call.seed})

    def _spliced(self, delta: Delta) -> bytes | None:
        around = self._around[delta.index]
        if self._first or around is None or delta.says_more or not delta.text:
            return None
        before, after = around
        return f"{before}{quote(delta.text)}{after}".encode()

    def _written(self, index: int) -> tuple[str, str] | None:
        """A whole event before and after the text."""
        around = self._shape.around(index)
        if around is None:
            return None
        head, common = _json(self._head)[:-1], _json(self._common)[1:-1]
        end = f",{common}}}\n\n" if common else "}\n\n"
        return f'data: {head},"choices":[{around[0]}', f"{around[1]}]{end}"

    def _full(self, delta: Delta, last: bool) -> bytes:
        generation, choices = self._call.generation, self._shape.choices(delta)
        ends = last and generation.finished and not self._call.include_usage
        events = [self._chunk(choice) for choice in choices[: len(choices) - ends]]
        if ends:
            usage = usage_body(generation.usage)
            events.append(self._chunk(choices[-1], {"seed": self._call.seed, "usage": usage}))
        return b"".join(events)

    def _chunk(self, choice: dict[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        said = self._first if extra is None else extra
        self._first = {}
        return as_event({**self._head, "choices": [choice], **self._common, **said})


def as_event(data: dict[str, Any], name: str | None = None) -> bytes:
    return ServerSentEvent(_json(data), event=name, sep="\n").encode()


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
