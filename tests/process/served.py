"""A whole server in a child process, and what its clients see."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from tests.process.harness import PATIENCE, arguments, children, is_gone, until

ROOT = Path(__file__).resolve().parents[2]
FRONT_END = (sys.executable, "-m", "tests.support.front_end")
NAMED = ("server.port=0", "server.served_model_name=demo")
SCRIPTED = (*FRONT_END, "scripted", *NAMED)
REAL = (*FRONT_END, "real", *NAMED)


@dataclass
class Server:
    """A running server."""

    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    @property
    def engine(self) -> int:
        """The engine's pid: the only running child that does not compile grammars."""
        found = {pid: arguments(pid) for pid in children(self.process.pid)}
        (engine,) = [pid for pid, words in found.items()
                     if any(words) and "engine.grammar.check" not in words]  # fmt: skip
        return engine

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE)

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def metrics(self) -> list[str]:
        """Return the lines of /metrics without the model name, which all of them have."""
        text = (await self.http.get("/metrics")).text
        return (
            re.sub(r',model_name="[^"]*"|model_name="[^"]*",?', "", text)
            .replace("{}", "")
            .splitlines()
        )

    async def until_status(self, path: str, status: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.status(path) != status:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(
    command: Sequence[str], environment: Mapping[str, str], *, log: IO[bytes] | None = None
) -> AsyncIterator[Server]:
    """Start a server and wait until it is ready. At the end it must be dead already, or it is
    killed, and so is its engine. `log` receives its stderr (by default the tests' own)."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=log
    )
    engine: int | None = None
    try:
        assert process.stdout is not None
        start_banner = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
        assert b" at http://" in start_banner, f"the server said {start_banner!r}"
        url = start_banner.decode().split(" at ")[1].removesuffix("/v1\n")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            server = Server(process, http)
            engine = server.engine
            yield server
        if process.returncode is not None:  # it exited by itself, so its engine has, too
            assert is_gone(engine)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await until(lambda: engine is None or is_gone(engine))


class SSE:
    """The events of one streamed completion, read one at a time; a 503's body counts as one."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code in (200, 503)
        self._lines = response.aiter_lines()

    async def next(self) -> str | None:
        """Return the data of the next event, or None at the end of the body."""
        async for line in self._lines:
            if line.startswith(("data: ", "{")):
                return line.removeprefix("data: ")
        return None

    async def rest(self) -> list[str]:
        events = []
        while (data := await self.next()) is not None:
            events.append(data)
        return events


@asynccontextmanager
async def completion(server: Server, **fields: Any) -> AsyncIterator[SSE]:
    """Yield the events of a streamed completion that has begun."""
    body = {"model": "demo", "prompt": [97, 98], "stream": True, **fields}
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        yield SSE(response)


def text_of(events: Sequence[str]) -> str:
    """Return the text that the chunks of a stream add up to."""
    chunks = [json.loads(data) for data in events if data != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
