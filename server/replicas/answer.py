"""answer: runs one request through this replica's app without a socket, for the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.types import ASGIApp, Message

from server.generation.progress import PROGRESS, ReplyProgress
from server.replicas.ingress import Forwarded, ResponsePart


async def answer(app: ASGIApp, request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
    """Yield what the app sends, as soon as it does; each piece comes with the ids of its text.
    Closing this iterator looks like a client disconnect to the app."""
    progress = request.progress or ReplyProgress()
    parts, news, gone = list[ResponsePart](), asyncio.Event(), asyncio.Event()
    read = False

    async def receive() -> Message:
        nonlocal read
        if read:
            await gone.wait()
            return {"type": "http.disconnect"}
        read = True
        return {"type": "http.request", "body": request.body}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            facts = replace(progress, tokens=[]) if progress.id else None
            parts.append(ResponsePart(start=message, progress=facts))
        else:
            ids = progress.take()
            new = ReplyProgress(tokens=ids) if ids else None
            parts.append(ResponsePart(body=message["body"], progress=new))
        news.set()

    scope = {**request.scope, "extensions": {PROGRESS: progress}, "state": {}}
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
