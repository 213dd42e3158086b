"""Answer: one request to the app of this replica, without a socket; the far end of the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message

from server.generation.told import TOLD, Told
from server.replicas.ingress import Asked, Part


async def answer(app: ASGIApp, asked: Asked) -> AsyncGenerator[Part, None]:
    """What the app sends; pieces that come together leave together, each with the ids of its text
    and none without. Whoever leaves closes this, and the app sees its client gone."""
    told = asked.told or Told()
    parts, news, gone = list[Part](), asyncio.Event(), asyncio.Event()
    read = False

    async def receive() -> Message:
        nonlocal read
        if read:
            await gone.wait()
            return {"type": "http.disconnect"}
        read = True
        return {"type": "http.request", "body": asked.body}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            facts = Told(told.id, told.created, told.seed, told.fingerprint) if told.id else None
            parts.append(Part(start=message, told=facts))
        else:
            ids = told.take()
            parts.append(Part(body=message["body"], told=Told(tokens=ids) if ids else None))
        news.set()

    scope = {**asked.scope, "extensions": {TOLD: told}, "state": {}}
    work = asyncio.ensure_future(app(scope, receive, send))
    work.add_done_callback(lambda _: news.set())
    try:
        while not work.done() or parts:
            await news.wait()
            news.clear()
            ready, parts[:] = parts[:], []
            for part in ready:
                yield part
        work.result()
    finally:
        gone.set()
