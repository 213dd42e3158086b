"""answer: runs one request through this replica's app without a socket, for the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.types import ASGIApp, Message

from server.generation.progress import PROGRESS, ReplyProgress
from server.replicas.ingress import Forwarded, ResponsePart


async def answer(app: ASGIApp, request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
    """Yield what the app sends, in whole events, with the ids of their text. Closing this iterator
    looks like a client disconnect to the app."""
    progress = request.progress or ReplyProgress()
    starts, bodies, ids = list[ResponsePart](), list[bytes](), list[int]()
    news, gone = asyncio.Event(), asyncio.Event()
    whole: list[Message] = [{"type": "http.request", "body": request.body}]

    async def receive() -> Message:
        if whole:
            return whole.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            facts = replace(progress, tokens=[]) if progress.id else None
            starts.append(ResponsePart(start=message, progress=facts))
        else:
            bodies.append(message["body"])
            ids.extend(progress.take())
        news.set()

    scope = {**request.scope, "extensions": {PROGRESS: progress}, "state": {}}
    work = asyncio.ensure_future(app(scope, receive, send))
    work.add_done_callback(lambda _: news.set())
    try:
        while not work.done() or bodies:
            await news.wait()
            news.clear()
            if starts:
                yield starts.pop()
            if bodies:
                part = ResponsePart(body=b"".join(bodies), progress=ReplyProgress(tokens=ids[:]))
                del bodies[:], ids[:]
                yield part
        work.result()
    finally:
        gone.set()
