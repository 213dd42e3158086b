"""Sender: how long it waits for a client to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from server.sender import Sender
from tests.support import timeless

UNREAD_SECONDS = 60.0


class Transport:
    """Has a full write buffer."""

    unread = 100_000

    def __init__(self) -> None:
        self.written = list[bytes]()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def write(self, data: bytes) -> None:
        self.written.append(data)


class Cycle:
    """A reply whose client has yet to read."""

    def __init__(self) -> None:
        self.scope = {"http_version": "1.1", "method": "POST"}
        self.transport = Transport()
        self.flow = FlowControl(self.transport)  # type: ignore[arg-type]
        self.disconnected = False

    async def send(self, message: Any) -> None: ...


async def send_unread(cycle: Cycle, cut: Callable[[], None]) -> None:
    """Send a chunk of a body that began while the client still read."""
    sender = Sender(cycle, cut, UNREAD_SECONDS)
    await sender({"type": "http.response.start", "status": 200})
    cycle.flow.pause_writing()
    await sender({"type": "http.response.body", "body": b"x", "more_body": True})


def test_only_a_client_that_reads_nothing_is_cut() -> None:
    """Bug: a stream was cut while its client was reading, if the client took longer than
    `unread_seconds` for as many bytes as make room for the next message."""
    cycle, cuts = Cycle(), list[float]()

    def cut() -> None:
        cuts.append(asyncio.get_running_loop().time())
        cycle.disconnected = True

    async def main() -> float:
        sending = asyncio.create_task(send_unread(cycle, cut))
        for _ in range(10):  # reads a byte now and then
            await asyncio.sleep(0.9 * UNREAD_SECONDS)
            cycle.transport.unread -= 1
            assert not sending.done()
        began = asyncio.get_running_loop().time()
        await sending
        return began

    began = timeless.run(main())
    assert not cycle.transport.written
    [cut_at] = cuts
    assert cut_at - began <= 2 * UNREAD_SECONDS


def test_a_client_that_reads_gets_what_waits() -> None:
    """Room after a wait of less than `unread_seconds`: the chunk is written."""
    cycle = Cycle()

    async def main() -> None:
        later = asyncio.get_running_loop().call_later
        later(0.5 * UNREAD_SECONDS, lambda: cycle.flow.resume_writing())
        await send_unread(cycle, lambda: None)

    timeless.run(main())
    assert cycle.transport.written == [b"1\r\nx\r\n"]
