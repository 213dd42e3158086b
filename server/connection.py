"""Connection: uvicorn's HTTP/1.1 protocol with bounds for the head of a request, with the error
envelope for what is no HTTP, and with answers that arrive where uvicorn's would be lost, in the
order of their requests.

uvicorn limits how long a kept-alive connection may idle, but a client that sends nothing, or half a
head, holds its file descriptor for ever, and an endless head all memory. Bodies have their own
bounds (`api.body`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.api.errors import ApiError, respond

LINGER_SECONDS = 10.0  # for what is still sent and nobody wants, before the connection closes
_TUNNEL = ApiError(
    400, "CONNECT asks for a tunnel, and this server is no proxy", code="invalid_http"
)
_HOSTLESS = ApiError(
    400,
    "a request of HTTP/1.1 must have one header `Host`, no more and no less",
    code="invalid_http",
)


class Connection(HttpToolsProtocol):
    """Closed when a head is not complete `HEAD_SECONDS` after it may first have been sent; bytes
    that trickle in do not extend that. A head of more than `HEAD_BYTES` is a 431, and so is as much
    behind a body: trailers are headers, too."""

    HEAD_SECONDS = 20.0
    HEAD_BYTES = 64 * 1024
    _deadline: asyncio.TimerHandle | None = None
    _has_head = False  # of the request whose body may still be on its way
    _head_size = 0  # bytes of a head so far, or behind the last piece of a body
    _answered: RequestResponseCycle | None = None  # `cycle` is the last that was asked for
    _refusal: ApiError | None = None  # of what came last; nothing is read behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._head_size += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._head_size > self.HEAD_BYTES:
            self._refuse(_too_long(self.HEAD_BYTES))
            return
        self._watch_head()

    def _parse(self, data: bytes) -> None:
        """Java's client offers HTTP/2 with each request, which may be ignored; but httptools takes
        what follows such a head for another protocol, body included. So it reads the head again,
        without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offered:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(_TUNNEL)
                    return
                data = self._head_without_offer() + data[offered.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, ApiError):
                    self._refuse(error.__context__)
                    return
                self.logger.warning("what came over a connection is no HTTP/1.1")
                self.send_400_response("")
                return

    def _size_of_head(self) -> int:
        """About: without the method, and the spaces that may stand around a header's value."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += (b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join([*lines, b"", b""])

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()
        self.pipeline.clear()
        if (cycle := self._answered) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def on_headers_complete(self) -> None:
        if self._size_of_head() > self.HEAD_BYTES:
            raise _too_long(self.HEAD_BYTES)
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._has_head, self._head_size = True, 0

    def on_body(self, body: bytes) -> None:
        self._head_size = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._has_head, self._head_size = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._send_refusal()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        elif [name for name, _ in cycle.scope["headers"]].count(b"host") != 1:
            app = _refuse_host
        if not cycle.keep_alive:
            app = _await_body(app, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no request, which is plain text."""
        self._refuse(ApiError(400, "this is no valid HTTP/1.1 request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """What came can be no request. Where that is in a body, it ends that body's request."""
        self._refusal = error
        self._disarm()
        if self._has_head and self.pipeline:
            self.pipeline.popleft()
        elif self._has_head and (cycle := self._answered) is not None:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self._hang_up()
                return
            self._answered = None
        self._send_refusal()

    def _send_refusal(self) -> None:
        """Behind the answers that are owed (RFC 9112, section 9.3.2)."""
        error = self._refusal
        if error is None or not self._is_idle or self.transport.is_closing():
            return
        body = json.dumps(error.body).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(STATUS_LINE[error.status] + head + b"%d\r\n\r\n" % len(body) + body)
        self._hang_up()

    def _hang_up(self) -> None:
        """Close, but let in what is still sent until the client has read what it was told: closing
        at once would reset the connection."""
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    @property
    def _is_idle(self) -> bool:
        """Whether no response is owed."""
        return not self.pipeline and (self._answered is None or self._answered.response_complete)

    def _watch_head(self) -> None:
        if self._has_head or not self._is_idle:
            self._disarm()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._is_idle and not self._has_head:
            self.timeout_keep_alive_handler()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _too_long(most: int) -> ApiError:
    said = f"the first line and headers of a request may have at most {most} bytes, as its trailers"
    return ApiError(431, said, code="head_too_large")


async def _refuse_host(scope: Any, receive: Any, send: Any) -> None:
    await respond(_HOSTLESS)(scope, receive, send)


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """For a client that does not know chunks, which uvicorn would send all the same: a body whose
    length is not known ends with the connection (RFC 9112, section 6.3)."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        unbounded = False

        async def send_plainly(message: Any) -> None:
            nonlocal unbounded
            if message["type"] == "http.response.start":
                names = [name.lower() for name, _ in message["headers"]]
                unbounded = b"content-length" not in names
                if unbounded:
                    cycle.keep_alive = cycle.chunked_encoding = False
                    cycle.expected_content_length = sys.maxsize
            elif unbounded and not message.get("more_body"):
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_plainly)

    return wrapped


def _await_body(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """For a connection that closes with the answer: while the body is still on its way (the answer
    is a refusal) that would reset it, and many a client, still sending, would never read why."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_wait(message: Any) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body")
            if not (ends and cycle.more_body):
                await send(message)
                return
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while (await receive()).get("more_body"):
                        pass
            await send({"type": "http.response.body", "body": b""})

        await app(scope, receive, send_and_wait)

    return wrapped
