"""The load: streams over raw sockets, as light as a client can be, and the clock of each event.

What arrives is kept as bytes and read after the measurement.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import EngineError

Kind = Literal["completions", "chat"]
PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BEGIN_SHARE = 0.1  # of the time is taken by beginning the streams one by one
LAST_CHUNK = b"0\r\n\r\n"  # of a body, behind [DONE]
# Prose, code, and characters of two and three bytes, which tokens may cut.
TEXT = """\
The river rose in the night, and by morning the café on the quay had closed its doors.
def area(width: int, height: int) -> int:
    return width * height  # 面積
"""


@dataclass
class Reply:
    """Clock readings (time.monotonic): when it was asked, and of each piece that arrived."""

    asked: float
    arrived: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The JSON of each event but [DONE], with the clock of the piece that completed it."""
        rest = b""
        for clock, piece in zip(self.arrived, self.pieces, strict=True):
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                at = event.find(b"data: {")  # behind the chunk's length, or the whole head
                if at >= 0:
                    yield clock, json.loads(event[at + len(b"data: ") :])


class _Reader(asyncio.Protocol):
    """One kept-alive connection, one stream at a time."""

    def __init__(self) -> None:
        self.reply = Reply(0.0)
        self.ended: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.reply.arrived.append(time.monotonic())
        self.reply.pieces.append(data)
        if data.endswith(LAST_CHUNK) or not self._goes_on(data):
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(EngineError("the server closed a connection in the middle of a stream"))

    def _goes_on(self, data: bytes) -> bool:
        """Whether it is a stream; anything else is a refusal."""
        return len(self.reply.pieces) > 1 or data.startswith(b"HTTP/1.1 200")

    def _end(self, error: EngineError | None) -> None:
        if self.ended is not None and not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)


async def stream_for(host: str, port: int, kind: Kind, *, tokens: int, until: float) -> list[Reply]:
    """One request after the other on one connection; none begins after `until`."""
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(_Reader, host, port)
    request, replies = _request(host, kind, tokens), list[Reply]()
    try:
        while not replies or time.monotonic() < until:
            reader.ended = loop.create_future()
            reader.reply = Reply(time.monotonic())
            transport.write(request)
            await reader.ended
            replies.append(reader.reply)
    finally:
        transport.close()
    return replies


async def streams(
    address: tuple[str, int], kind: Kind, *, count: int, tokens: int, seconds: float
) -> list[Reply]:
    """`count` streams side by side for so long, begun one by one."""
    until = time.monotonic() + seconds
    tasks = []
    for _ in range(count):
        task = stream_for(*address, kind, tokens=tokens, until=until)
        tasks.append(asyncio.create_task(task))
        await asyncio.sleep(seconds * BEGIN_SHARE / count)
    return [reply for replies in await asyncio.gather(*tasks) for reply in replies]


def _request(host: str, kind: Kind, tokens: int) -> bytes:
    said: dict[str, Any] = {"prompt": TEXT}
    if kind == "chat":
        said = {"messages": [{"role": "user", "content": TEXT}]}
    fields = {"model": "foredraft-demo", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    # A chat's prompt, and so its reply, begins with one, and a token without text has no event.
    fields["skip_special_tokens"] = False
    body = json.dumps({**fields, **said}).encode()
    head = (
        f"POST {PATHS[kind]} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
