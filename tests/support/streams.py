"""A reader of one stream that waits for the next Output."""

from __future__ import annotations

from engine.messages import Output
from server.engine.mailbox import Stream


async def read(stream: Stream) -> Output:
    """Return `stream.take()` as soon as something has arrived."""
    while not stream.has_output:
        stream.wake.clear()
        await stream.wake.wait()
    return stream.take()
