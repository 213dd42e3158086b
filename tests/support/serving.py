"""The app with a FakeClient, behind a real uvicorn on a free port, in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from engine.config import EngineConfig
from server.api.services import Services
from server.app import create_app
from server.config import Config, ServerConfig
from server.connection import Connection
from server.engine.client import EngineClient
from server.generation.structured import GrammarChecker
from server.keys import Keyring
from server.listening import listen
from server.observe.exchange import Exchange
from server.observe.metrics import Metrics
from server.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient

MODEL = "fake-model"


class QuickServer(uvicorn.Server):
    """Ends as soon as `end` is called in its event loop: uvicorn's own looks for the end, and for
    the last connection, every 0.1 s."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    async def main_loop(self) -> None:
        tasks = [
            asyncio.create_task(super().main_loop()),
            asyncio.create_task(self._ended.wait()),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.002)
        for task in list(state.tasks):
            task.cancel()
        await self.lifespan.shutdown()


@dataclass
class Served:
    """A running server: its address, the fake engine client, and its event loop."""

    url: str
    client: FakeClient
    metrics: Metrics
    loop: asyncio.AbstractEventLoop
    runner: QuickServer

    def http(self, **options: Any) -> httpx.Client:
        """Return a client that is patient with a loaded machine."""
        return httpx.Client(**{"base_url": self.url, "timeout": 60, **options})

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function in the server's event loop."""
        self.loop.call_soon_threadsafe(function, *args)

    def leave(self, path: str, body: dict[str, Any], *, requests: int = 1) -> None:
        """Post a body, and leave as soon as it is so many requests of the engine."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        host, _, port = self.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as asking:
            asking.sendall(head.encode() + content)
            self.until(lambda: self.client.inflight == requests)

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until `condition` is true; fails after `seconds`."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("waited in vain")


def services_of(
    client: EngineClient,
    config: Config,
    *,
    tokenizer: Tokenizer | None = None,
    on_end: Callable[[Exchange], None] | None = None,
) -> Services:
    """Return what an app needs, with metrics of its own."""
    metrics = Metrics(router_names=config.server.router_names)
    return Services(
        config=config,
        tokenizer=tokenizer if tokenizer is not None else ByteTokenizer(),
        client=client,
        metrics=metrics,
        grammars=GrammarChecker(config, metrics.observe_grammar),  # starts with the first grammar
        on_end=on_end,
        keyring=Keyring(config.server),
    )


@contextmanager
def serve(
    client: FakeClient | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    on_end: Callable[[Exchange], None] | None = None,
    **server: Any,
) -> Iterator[Served]:
    """Serve within the context. `server`: fields of ServerConfig."""
    client = client if client is not None else FakeClient()
    loops: list[asyncio.AbstractEventLoop] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield
        await grammars.close()

    config = Config(ServerConfig(**{"served_model_name": MODEL, **server}), EngineConfig())
    services = services_of(client, config, tokenizer=tokenizer, on_end=on_end)
    metrics, grammars = services.metrics, services.grammars
    app = create_app(services)
    app.router.lifespan_context = lifespan
    uvicorn_config = uvicorn.Config(
        app,
        http=Connection,
        log_level="critical",
        timeout_keep_alive=config.server.keep_alive_seconds,
        timeout_graceful_shutdown=2,
    )
    runner = QuickServer(uvicorn_config)
    [listener] = listen("127.0.0.1", 0)
    thread = threading.Thread(target=runner.run, args=([listener],), daemon=True)
    thread.start()
    pause = threading.Event()
    while not runner.started:
        assert thread.is_alive(), "the server did not start"
        pause.wait(0.005)
    port = listener.getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", client, metrics, loops[0], runner)
    finally:
        loops[0].call_soon_threadsafe(runner.end)
        thread.join(120)  # normally instant, but slow on a loaded machine
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def description(client: FakeClient | None = None, **server: Any) -> dict[str, Any]:
    """Return /openapi.json of such a server."""
    with serve(client, **server) as served:
        reply = httpx.get(f"{served.url}/openapi.json", timeout=60)  # a loaded machine is slow
        found: dict[str, Any] = reply.raise_for_status().json()
    return found
