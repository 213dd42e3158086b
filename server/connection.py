"""Connection: uvicorn's HTTP/1.1 protocol with a deadline for the head of a request, and with the
error envelope for what is no HTTP.

uvicorn limits how long a kept-alive connection may idle, but a client that sends nothing, or half a
head, holds its file descriptor for ever. Bodies have their own deadline (`api.body`).
"""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.api.errors import ApiError


class Connection(H11Protocol):
    """Closed when a head is not complete `HEAD_SECONDS` after it may first have been sent; bytes
    that trickle in do not extend that."""

    HEAD_SECONDS = 20.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no request, which is plain text."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = ApiError(400, "this is no valid HTTP/1.1 request", code="invalid_http")
            body = json.dumps(error.body).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers.append(("content-length", str(len(body))))
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_handler()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
