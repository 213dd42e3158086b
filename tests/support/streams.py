"""A reader of one stream, which sleeps until there is something."""

from __future__ import annotations

from engine.messages import Output
from server.engine.mailbox import Stream


async def read(stream: Stream) -> Output:
    """What `take` gives, as soon as there is something."""
    while not stream.has_news:
        stream.wake.clear()
        await stream.wake.wait()
    return stream.take()
