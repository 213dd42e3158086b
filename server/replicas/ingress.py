"""Ingress: what stands before many replicas and hands each request to one of them. Where that one
dies, another one is asked: a stream goes on there behind what has left of it (`resume`), and of an
answer that has not begun to leave nothing is lost but time.

Promises: nothing of a reply is repeated, missing or different; a stream that cannot go on ends with
an error that says why. A request that was present at MOST_LOSSES deaths in a row is not asked for
again, so that none takes every replica along. How a replica is asked is the caller's: no Ray here.
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
from server.api.gather import until_gone
from server.api.sse import DONE, as_event
from server.generation.told import Told
from server.observe.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

MOST_LOSSES = 3
RETRY_SECONDS = 0.5  # between tries to go on, while replicas refuse for the moment
PLAIN = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
         "root_path", "headers", "client", "server")  # of a scope, what travels  # fmt: skip
_FOR_THE_MOMENT = (429, 503)
# Of what has no [DONE].
ENDS = (b"response.completed", b"response.incomplete", b"response.failed", b"message_stop")


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, whole. `told`: the name of the reply that it is to go on with."""

    scope: dict[str, Any]
    body: bytes
    told: Told | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What a replica says next: the start of its answer (an ASGI message), then pieces of its body.
    `told`: with the start of a reply its facts, with a piece its ids alone."""

    start: Message | None = None
    body: bytes = b""
    told: Told | None = None


Ask = Callable[[Asked], AsyncGenerator[Part, None]]


class ReplicaLost(Exception):
    """It died, or cannot be reached."""


class Ingress:
    """An ASGI app. `ask` yields the parts of a replica's answer; it raises ReplicaLost, or ApiError
    where no replica answers. `metrics`: of every replica, by name. `seconds` that a stream may be
    cut; 0: it ends with an error at once."""

    def __init__(
        self,
        ask: Ask,
        *,
        metrics: Callable[[], Awaitable[Mapping[str, bytes]]],
        max_body_bytes: int,
        seconds: float,
    ) -> None:
        self._ask = ask
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        if scope["type"] != "http":
            return  # WebSockets are refused so
        http = Request(scope, receive)
        try:
            if (http.method, http.url.path) == ("GET", "/metrics"):
                found = Response(merged(await self._metrics()), media_type=CONTENT_TYPE)
                return await found(scope, receive, send)
            body = await read_body(http, self._max_body_bytes)
            plain = {name: scope[name] for name in PLAIN if name in scope}
            answer = _Answer(self._ask, Asked(plain, body), send, self._seconds)
            await _unless_gone(answer.run(), receive)
        except ClientGone:
            pass
        except ApiError as error:
            await respond(error, scope["path"])(scope, receive, send)


class _Answer:
    """To one request, of one replica after the other."""

    def __init__(self, ask: Ask, asked: Asked, send: Send, seconds: float) -> None:
        self._ask = ask
        self._asked = asked
        self._send = send
        self._seconds = seconds
        self._told: Told | None = None  # of a stream that has begun to leave
        self._events, self._over = 0, False  # that have left; whether the last one has
        self._losses = 0  # in a row, without a piece between
        self._deadline = 0.0  # to go on

    async def run(self) -> None:
        """Raises ApiError as long as nothing has left."""
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
                if self._told is None:
                    raise
                if error.status in _FOR_THE_MOMENT and time.monotonic() < self._deadline:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
            return await self._give_up(error)

    async def _give_up(self, why: ApiError) -> None:
        said = "the replica that made this reply was lost"
        if self._told is None:
            raise ApiError(503, f"{said} {self._losses} times", code="replica_lost")
        said = f"{said}, and no other one goes on with it: {why.message}"
        error, path = ApiError(503, said, code="replica_lost"), self._asked.scope["path"]
        body, name = error.body_at(path), "error" if path.startswith(MESSAGES) else None
        if path.endswith("/responses"):  # whose events are of another form
            name, told = "error", body["error"] | {"type": "error"}
            body |= told | {"sequence_number": self._events}
        await self._send_body(as_event(body, name))
        await self._send_body(b"", more=False)

    async def _relay(self) -> None:
        """All that one replica says. Raises ReplicaLost, or ApiError before it said anything."""
        async with aclosing(self._ask(self._next())) as parts:
            first = await anext(parts)
            assert first.start is not None
            if self._told is not None and first.start["status"] != 200:
                raise _refusal(first.start["status"], await _rest(parts))
            if self._told is None:
                if not _is_stream(first.start):
                    body = await _rest(parts)
                    await self._send(first.start)
                    return await self._send_body(body, more=False)
                assert first.told is not None, "all streams are replies"
                self._told = first.told
                await self._send(first.start)
            async for part in parts:
                self._losses = 0
                if part.told is not None:
                    self._told.tokens += part.told.tokens
                await self._send_body(part.body)
                if not part.body.startswith((b":", b"event: ping")):  # which says nothing
                    self._events += part.body.count(b"\n\n")
                self._over |= _has_end(part.body)
        await self._send_body(b"", more=False)

    def _next(self) -> Asked:
        """What to ask for: the whole, or the rest of a stream."""
        told = self._told
        if told is None:
            return self._asked
        name = Told(id=told.id, created=told.created)
        if not self._events:
            return replace(self._asked, told=name)
        logger.info("%s goes on behind %d tokens", told.id, len(told.tokens))
        said = json.loads(self._asked.body.removeprefix(BOM_UTF8))  # a replica has read it before
        before = (said.get("resume") or {}).get("token_ids", [])
        said["resume"] = {
            "token_ids": [*before, *told.tokens],
            "seed": told.seed,
            "system_fingerprint": told.fingerprint,
        }
        return Asked(self._asked.scope, json.dumps(said).encode(), name)

    async def _send_body(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def _live(receive: Receive, send: Send) -> None:
    """There is nothing to begin or to end."""
    for kind in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{kind}.complete"})


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Raises ClientGone as soon as the client has left."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _rest(parts: AsyncGenerator[Part, None]) -> bytes:
    return b"".join([part.body async for part in parts])


def _is_stream(start: Message) -> bool:
    kind = dict(start["headers"]).get(b"content-type", b"")
    return bool(kind.startswith(b"text/event-stream"))


def _has_end(body: bytes) -> bool:
    """Whether the last event of a reply is in it."""
    return body.endswith(DONE) or any(b"event: %b\n" % end in body for end in ENDS)


def _refusal(status: int, body: bytes) -> ApiError:
    """The envelope of a replica's error, read again."""
    return ApiError(status, json.loads(body)["error"]["message"])


def merged(texts: Mapping[str, bytes]) -> bytes:
    """The metrics of all replicas as one text, each series with the label `replica`."""
    families: dict[bytes, list[bytes]] = {}
    for name, text in texts.items():
        label = b'{replica="%b"' % name.encode()
        for block in text.split(b"# HELP ")[1:]:
            meaning, type_, *samples = block.splitlines(keepends=True)
            marked = [_marked(sample, label) for sample in samples]
            families.setdefault(b"# HELP " + meaning + type_, []).extend(marked)
    return b"".join(head + b"".join(samples) for head, samples in families.items())


def _marked(sample: bytes, label: bytes) -> bytes:
    """With one label more: of `name value` or `name{labels} value`."""
    series, _, value = sample.rpartition(b" ")
    name, labelled, labels = series.partition(b"{")
    return name + label + (b"," + labels if labelled else b"}") + b" " + value
