"""Ingress: forwards each request to one of many replicas. If that replica dies, the request goes to
another one: a stream continues after what was already sent (`resume`); a reply of which nothing was
sent starts again.

Guarantees: no part of a reply is repeated, missing or different; a stream that cannot continue ends
with an error that says why. A request that was running at MOST_LOSSES deaths in a row is not
forwarded again, since it may be what crashes the replicas. The caller passes the function that
calls a replica, so this does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api.body import read_body
from server.api.errors import MESSAGES, ApiError, ClientGone, respond
from server.api.gather import until_disconnect
from server.api.sse import DONE, PING_SECONDS, as_event
from server.generation.progress import ReplyProgress
from server.observe.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

MOST_LOSSES = 3
RETRY_SECONDS = 0.5  # between attempts to continue, while replicas refuse temporarily
FORWARDED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
             "root_path", "headers", "client", "server")  # keys of a scope  # fmt: skip
_FOR_THE_MOMENT = (429, 503)
# Last events of streams without [DONE].
ENDS = (b"response.completed", b"response.incomplete", b"response.failed", b"message_stop")


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A whole HTTP request. `progress`: id and creation time of the reply that it continues."""

    scope: dict[str, Any]
    body: bytes
    progress: ReplyProgress | None = None


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """A part of a replica's response: its start (an ASGI message) or a piece of its body.
    `progress`: with the start everything but the token ids, with a piece only its token ids."""

    start: Message | None = None
    body: bytes = b""
    progress: ReplyProgress | None = None


Ask = Callable[[Forwarded], AsyncGenerator[ResponsePart, None]]


class ReplicaLost(Exception):
    """The replica died, or cannot be reached."""


class Ingress:
    """An ASGI app. `ask` yields the parts of a replica's response; it raises ReplicaLost, or
    ApiError if no replica answers. `metrics`: returns those of every replica, by name. `seconds`:
    how long an interrupted stream waits for a replica; 0: it ends with an error at once."""

    def __init__(
        self,
        ask: Ask,
        *,
        metrics: Callable[[], Awaitable[Mapping[str, bytes]]],
        max_body_bytes: int,
        seconds: float,
        ping_seconds: float = PING_SECONDS,
    ) -> None:
        self._ask = ask
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._seconds = seconds
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        if scope["type"] != "http":
            return  # returning refuses a WebSocket
        http = Request(scope, receive)
        try:
            if (http.method, http.url.path) == ("GET", "/metrics"):
                response = Response(merged(await self._metrics()), media_type=CONTENT_TYPE)
                return await response(scope, receive, send)
            body = await read_body(http, self._max_body_bytes)
            forwarded = {name: scope[name] for name in FORWARDED if name in scope}
            answer = _Answer(self._ask, Forwarded(forwarded, body), send, self._seconds)
            await _unless_disconnected(answer.run(), answer.ping(self._ping_seconds), receive)
        except ClientGone:
            pass
        except ApiError as error:
            await respond(error, scope["path"])(scope, receive, send)


class _Answer:
    """The response to one request, from one replica after the other."""

    def __init__(self, ask: Ask, request: Forwarded, send: Send, seconds: float) -> None:
        self._ask = ask
        self._request = request
        self._send = send
        self._seconds = seconds
        self._progress: ReplyProgress | None = None  # of a stream, once its headers were sent
        self._sent = 0  # pieces of the body
        self._events, self._over = 0, False  # events sent; whether the last event was sent
        self._losses = 0  # in a row, without a piece of the body in between
        self._arrival = time.monotonic()
        self._deadline = 0.0  # for continuing, by time.monotonic()

    async def run(self) -> None:
        """Send the response. Raises ApiError only if nothing was sent yet."""
        while True:
            try:
                return await self._relay()
            except ReplicaLost:
                if self._over:
                    return await self._send_body(b"", more=False)
                self._losses += 1
                self._deadline = time.monotonic() + self._seconds
                if self._seconds and self._losses < MOST_LOSSES:
                    continue
                error = ApiError(503, "it was lost; try again in a moment")
            except ApiError as refusal:
                error = refusal
                if self._progress is None:
                    raise
                if error.status in _FOR_THE_MOMENT and time.monotonic() < self._deadline:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
            return await self._give_up(error)

    async def ping(self, seconds: float) -> None:
        """Send pings, so that proxies do not close a stream that waits for another replica."""
        before = 0
        while True:
            await asyncio.sleep(seconds)
            if self._sent == before and self._progress is not None:
                await self._send_body(b": ping\n\n")
            before = self._sent

    async def _give_up(self, why: ApiError) -> None:
        why_lost = "the replica that made this reply was lost"
        if self._progress is None:
            raise ApiError(503, f"{why_lost} {self._losses} times", code="replica_lost")
        sentence = f"{why_lost}, and no other replica can resume it: {why.message}"
        error, path = ApiError(503, sentence, code="replica_lost"), self._request.scope["path"]
        body, name = error.body_at(path), "error" if path.startswith(MESSAGES) else None
        if path.endswith("/responses"):  # whose events are of another form
            name = "error"
            body |= body["error"] | {"type": "error"} | {"sequence_number": self._events}
        await self._send_body(as_event(body, name))
        await self._send_body(b"", more=False)

    async def _relay(self) -> None:
        """Relay one replica's response. Raises ReplicaLost, or ApiError before it starts."""
        async with aclosing(self._ask(self._next())) as parts:
            first = await anext(parts)
            assert first.start is not None
            if self._progress is not None and first.start["status"] != 200:
                raise _refusal(first.start["status"], await _rest(parts))
            if self._progress is None:
                kind = dict(first.start["headers"]).get(b"content-type", b"")
                if not kind.startswith(b"text/event-stream"):
                    body = await _rest(parts)
                    await self._send(first.start)
                    return await self._send_body(body, more=False)
                assert first.progress is not None, "all streams are replies"
                await self._send(first.start)
                self._progress = first.progress
            async for part in parts:
                self._losses = 0
                if part.progress is not None:
                    self._progress.tokens += part.progress.tokens
                await self._send_body(part.body)
                for event in part.body.split(b"\n\n")[:-1]:
                    self._events += not event.startswith((b":", b"event: ping"))
                self._over |= _has_end(part.body)
        await self._send_body(b"", more=False)

    def _next(self) -> Forwarded:
        """Return the request to forward: the client's own, or one for the rest of its stream."""
        progress = self._progress or ReplyProgress()
        spent = time.monotonic() - self._arrival
        name = ReplyProgress(id=progress.id, created=progress.created, spent=spent)
        if not self._events:
            return replace(self._request, progress=name)
        logger.info("%s continues after %d tokens", progress.id, len(progress.tokens))
        body = json.loads(self._request.body.removeprefix(BOM_UTF8))  # a replica has validated it
        before = (body.get("resume") or {}).get("token_ids", [])
        body["resume"] = {
            "token_ids": [*before, *progress.tokens],
            "seed": progress.seed,
            "system_fingerprint": progress.fingerprint,
        }
        return Forwarded(self._request.scope, json.dumps(body).encode(), name)

    async def _send_body(self, body: bytes, *, more: bool = True) -> None:
        self._sent += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def _live(receive: Receive, send: Send) -> None:
    """Answer the ASGI lifespan events: there is nothing to start or stop."""
    for kind in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{kind}.complete"})


async def _unless_disconnected(
    work: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None], receive: Receive
) -> None:
    """Run `work`. Raises ClientGone once the client disconnects. `beside` ends with the work."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_disconnect(receive))
    tasks = (working, watching, asyncio.ensure_future(beside))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _rest(parts: AsyncGenerator[ResponsePart, None]) -> bytes:
    return b"".join([part.body async for part in parts])


def _has_end(body: bytes) -> bool:
    """Whether `body` holds the last event of a reply."""
    return body.endswith(DONE) or any(b"event: %b\n" % end in body for end in ENDS)


def _refusal(status: int, body: bytes) -> ApiError:
    """Return the error from a replica's error envelope."""
    return ApiError(status, json.loads(body)["error"]["message"])


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Return the metrics of all replicas as one text, each series with the label `replica`."""
    families: dict[bytes, list[bytes]] = {}
    for name, text in texts.items():
        label = b'{replica="%b"' % name.encode()
        for block in text.split(b"# HELP ")[1:]:
            meaning, type_, *samples = block.splitlines(keepends=True)
            marked = [_marked(sample, label) for sample in samples]
            families.setdefault(b"# HELP " + meaning + type_, []).extend(marked)
    return b"".join(head + b"".join(samples) for head, samples in families.items())


def _marked(sample: bytes, label: bytes) -> bytes:
    """Add `label`, which begins with "{", to a line `name value` or `name{labels} value`."""
    series, _, value = sample.rpartition(b" ")
    name, labelled, labels = series.partition(b"{")
    return name + label + (b"," + labels if labelled else b"}") + b" " + value
