"""Readers of one stream."""

from __future__ import annotations

from engine.messages import Output
from server.engine.mailbox import Stream


async def read(stream: Stream) -> Output:
    """Return `stream.take()` as soon as something has arrived."""
    while (output := stream.take()) is None:
        stream.wake.clear()
        await stream.wake.wait()
    return output


def take(stream: Stream) -> Output:
    """Return what has arrived, which must be something."""
    output = stream.take()
    assert output is not None
    return output
