"""An EngineClient on real sockets, with a hand-driven peer in place of the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from engine.messages import Command, Event
from server.engine.client import EngineClient


class Peer:
    """The engine's end of the sockets, driven by hand."""

    def __init__(self, commands: str, events: str) -> None:
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        self._commands.connect(commands)
        self._events.connect(events)

    async def receive(self) -> Command:
        data = await asyncio.wait_for(self._commands.recv(), 10)
        command: Command = msgspec.msgpack.decode(data, type=Command)
        return command

    async def send(self, event: Event) -> None:
        await self._events.send(msgspec.msgpack.encode(event))

    async def send_bytes(self, data: bytes) -> None:
        await self._events.send(data)

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def connected(
    folder: Path, client: EngineClient
) -> AsyncIterator[tuple[Peer, asyncio.Queue[Event]]]:
    """Yield a ready client's peer, and the queue of events that the client passed on."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    endpoints = f"ipc://{folder}/c", f"ipc://{folder}/e"
    client.connect(*endpoints, on_event=events.put_nowait)
    client.state = "ready"
    peer = Peer(*endpoints)
    try:
        yield peer, events
    finally:
        peer.close()
        client.disconnect()


async def heard(events: asyncio.Queue[Event]) -> Event:
    return await asyncio.wait_for(events.get(), 10)
