"""Connection: uvicorn's h11 protocol with limits on the size and time of a request head, and with
the API's error envelope for invalid HTTP.

h11 reads one request at a time, so responses keep the order of the requests. It has no timeouts: a
client that sends nothing or half a head, or that does not read the end of its reply, would hold its
file descriptor for ever. Bodies have their own limits (`api.body`); `sender` writes the replies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.api.errors import ApiError
from server.api.exchanges import exchange_of
from server.observe.exchange import Exchange, request_id
from server.sender import LINGER_SECONDS, Sender

_TUNNEL = "CONNECT asks for a tunnel, and this server is no proxy"


class Connection(H11Protocol):
    """Closes if a head is not complete `HEAD_SECONDS` after its first byte or after the connection
    was made; bytes that trickle in do not extend this. Between requests uvicorn's
    `timeout_keep_alive` applies. A head or trailers of more than `HEAD_BYTES` get a 431. The client
    must read some of an unread reply, complete or not, every `UNREAD_SECONDS`."""

    HEAD_SECONDS = 20.0
    UNREAD_SECONDS = 60.0
    HEAD_BYTES = 64 * 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedParser(self.HEAD_BYTES, self._refuse)
        app = self.app
        self.app = lambda scope, receive, send: app(
            scope, receive, Sender(self.cycle, self.cut, self.UNREAD_SECONDS)
        )
        self._unread: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False  # nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch_head()

    def cut(self) -> None:
        """Close at once and drop unread data; a running request sees its client disconnect."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # so that uvicorn does not log an incomplete response
        self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader(0)
        if self.conn.trailing_data[0]:  # the next request has begun to arrive
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()
        if self._unread is not None:
            self._unread.cancel()

    def _watch_reader(self, before: int) -> None:
        """Cut the connection if the client has read nothing since the last check. `before`: unread
        bytes at that check; 0 at the first."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        unread = self.transport.get_write_buffer_size()
        if unread and unread == before:
            self.cut()
        elif unread:
            self._unread = self.loop.call_later(self.UNREAD_SECONDS, self._watch_reader, unread)

    def _get_upgrade(self) -> None:
        """Ignore upgrades without a warning: Java's client offers HTTP/2 with each request."""

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer invalid input with an error, then close. Inside a body, end its request too."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._disarm()
        error = ApiError(status, message, code=code)
        cycle: Any = self.cycle
        unanswered = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if unanswered:  # the request's log line is written when it ends
                self._write_error(error, exchange_of(cycle.scope))
        elif unanswered:
            exchange = Exchange(id=request_id())
            self._write_error(error, exchange)
            exchange.end()
        # Closing now would reset the connection, and a client that is still sending would never
        # read the error.
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _write_error(self, error: ApiError, exchange: Exchange) -> None:
        body = json.dumps(error.body).encode()
        exchange.status, exchange.error = error.status, error.code
        headers = [
            (b"x-request-id", exchange.id.encode()),
            (b"content-type", b"application/json"),
            (b"connection", b"close"),
            (b"content-length", b"%d" % len(body)),
        ]
        reason = STATUS_PHRASES[error.status]
        response = h11.Response(status_code=error.status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def _watch_head(self) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(
                self.HEAD_SECONDS, self.timeout_keep_alive_handler
            )

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _BoundedParser(h11.Connection):
    """Calls `refuse(status, message, code)` for an invalid request instead of raising. h11 limits
    only incomplete heads; this also limits heads that arrive in one piece."""

    def __init__(self, most: int, refuse: Callable[[int, str, str], None]) -> None:
        super().__init__(h11.SERVER, most)
        self._most = most
        self._refuse = refuse

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request | h11.EndOfMessage) and _size(event) > self._most:
                raise h11.RemoteProtocolError("too long", error_status_hint=431)
            if isinstance(event, h11.Request) and event.method == b"CONNECT":
                raise h11.RemoteProtocolError(_TUNNEL)
            return event
        except h11.RemoteProtocolError as error:
            self._refuse(*self._refusal(error))
            return h11.NEED_DATA

    def _refusal(self, error: h11.RemoteProtocolError) -> tuple[int, str, str]:
        if error.error_status_hint == 431:
            bound = f"may have at most {self._most} bytes, as its trailers"
            return 431, f"the first line and headers of a request {bound}", "head_too_large"
        message = "this is no valid HTTP/1.1 request"
        if str(error) == _TUNNEL:
            message = _TUNNEL
        elif "Host: header" in str(error):
            message = "a request of HTTP/1.1 must have one header `Host`, no more and no less"
        return 400, message, "invalid_http"


def _size(event: h11.Request | h11.EndOfMessage) -> int:
    """Return the approximate size in bytes: without the method and optional whitespace."""
    line = len(event.target) if isinstance(event, h11.Request) else 0
    return line + sum(len(name) + len(value) + 4 for name, value in event.headers)
