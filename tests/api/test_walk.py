"""The way of a request through the files, traced, and as docs/architecture.md describes it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from engine.config import EngineConfig
from engine.messages import Output, Outputs, StepMetrics, Submit
from server.app import create_app
from server.config import Config, ServerConfig
from server.connection import Connection
from server.engine.client import EngineClient
from server.listening import listen
from tests.support.documents import ROOT
from tests.support.fake_client import make_ready
from tests.support.peer import Peer, connected, heard
from tests.support.serving import services_of

SERVER = f"{ROOT / 'server'}/"
BOTH_WAYS = {"Exchanges.__call__.<locals>.answer", "EngineClient._on_event"}  # as the text says
Calls = dict[str, set[str]]  # by file: the functions that were called


class Walk:
    """Records the calls until the request is sent to the engine, and those from its tokens on."""

    def __init__(self) -> None:
        self.into: Calls = defaultdict(set)
        self.out: Calls = defaultdict(set)
        self._calls: Calls | None = self.into

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SERVER):
            return
        if code.co_qualname == "EventReader._read":
            self._calls = self.out
        if self._calls is not None and not code.co_qualname.endswith(("__init__", "<lambda>")):
            self._calls[code.co_filename.removeprefix(SERVER)].add(code.co_qualname)
        if code.co_qualname == "EngineClient.send":
            self._calls = None


def app_of(client: EngineClient) -> FastAPI:
    config = Config(ServerConfig(api_key="key"), EngineConfig())
    return create_app(services_of(client, config))


async def stream(port: int, path: str, body: dict[str, Any], peer: Peer) -> bytes:
    """Send a request, have the peer answer with two tokens, and return what has arrived then."""
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: key\r\nContent-Length: {len(content)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\n\r\n" + content)
    submit = await peer.receive()
    assert isinstance(submit, Submit)
    await reader.readuntil(b"\r\n\r\n")
    tokens = Output(id=submit.id, tokens=[104, 105], cached_tokens=0, rounds=1)
    await peer.send(Outputs([tokens], StepMetrics(step=1)))
    found = await asyncio.wait_for(reader.readuntil(b"hi"), 10)
    writer.close()
    return found


async def traced(folder: Path, path: str, body: dict[str, Any]) -> Walk:
    client, walk = EngineClient(), Walk()
    [listener] = listen("127.0.0.1", 0)
    config = uvicorn.Config(app_of(client), http=Connection, lifespan="off", log_config=None)
    http = uvicorn.Server(config)
    async with connected(folder, client) as (peer, events):
        await peer.send(make_ready())
        await heard(events)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        while not http.started:
            await asyncio.sleep(0.01)
        before = sys.getprofile()
        sys.setprofile(walk)
        try:
            assert b"data: {" in await stream(listener.getsockname()[1], path, body, peer)
        finally:
            sys.setprofile(before)
            http.should_exit = True
            await serving
    return walk


def files(way: str) -> list[str]:
    """Return the files in the first column of the table of one way."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition(f"| on the way {way} ")[2]
    return re.findall(r"^\| `server/([\w/]+\.py)` \|", table.partition("\n\n")[0], re.MULTILINE)


def test_the_document_names_no_file_twice() -> None:
    both = [*files("in"), *files("out")]
    assert len(both) > 15
    assert sorted(both) == sorted({*both})
    assert all(Path(SERVER, name).exists() for name in both)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_no_file_is_passed_twice(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    """Law: the files of the way in are not those of the way out, each way as documented."""
    walk = asyncio.run(traced(tmp_path, path, {"model": "foredraft-demo", **body}))
    into, out = files("in"), files("out")
    assert not set(into) - walk.into.keys()
    assert not set(out) - walk.out.keys()
    assert not set(out) & walk.into.keys()
    again = {name: walk.out[name] - BOTH_WAYS for name in into if name in walk.out}
    assert not any(again.values()), again
