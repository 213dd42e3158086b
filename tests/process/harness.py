"""A supervised scripted engine, and queries to the operating system."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from engine.config import EngineConfig
from engine.messages import Output, SamplingParams, Submit
from server.config import Config, ServerConfig
from server.engine import lifecycle
from server.engine.client import EngineClient
from server.engine.lifecycle import EngineState
from server.engine.mailbox import Stream
from server.supervise.supervisor import EngineSupervisor
from tests.support.scripted import COMMAND, Script
from tests.support.streams import read

PATIENCE = 120.0  # seconds; how long a loaded machine may take for what is normally instant
AS_USUAL = ServerConfig(resume_seconds=0.0)


@dataclass
class SupervisedEngine:
    """A supervisor, its client, its past states, and the folder of its files."""

    supervisor: EngineSupervisor
    client: EngineClient
    folder: Path
    states: list[EngineState] = field(default_factory=list)

    def submit(self, id: str, max_tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> Stream:
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        return self.client.submit(Submit(id, list(prompt), params, 0.0))

    async def reach(self, state: EngineState, *, times: int = 1) -> None:
        """Wait until the engine has entered `state` `times` times."""
        await until(lambda: self.states.count(state) >= times)


@asynccontextmanager
async def supervised(
    script: Script,
    *,
    settings: ServerConfig = AS_USUAL,
    backoff: float = 0.05,
    command: Sequence[str] = COMMAND,
) -> AsyncIterator[SupervisedEngine]:
    """Start an engine, not waiting until it is ready; at the end nothing of it may be left."""
    with (
        short_folder() as folder,
        patch.object(tempfile, "tempdir", str(folder)),
        patch.dict(os.environ, script.environment()),
        patch.object(lifecycle, "BACKOFF_SECONDS", backoff),
    ):
        states: list[EngineState] = []
        client = EngineClient(resume_seconds=settings.resume_seconds)
        supervisor = EngineSupervisor(
            Config(settings, EngineConfig()),
            client,
            command=command,
            on_state=states.append,
        )
        await supervisor.start()
        try:
            yield SupervisedEngine(supervisor, client, folder, states)
        finally:
            pid = supervisor.pid
            await supervisor.stop(0)
        assert pid is None or is_gone(pid)
        assert list(folder.iterdir()) == []


@contextmanager
def short_folder() -> Iterator[Path]:
    """Create a folder whose path is short enough for Unix sockets; pytest's may be too long."""
    folder = Path(tempfile.mkdtemp(prefix="ft-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def read_all(stream: Stream) -> list[Output]:
    """Return every Output up to the one with `finish`. Raises EngineLost."""
    outputs = [await read(stream)]
    while outputs[-1].finish is None:
        outputs.append(await read(stream))
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def is_gone(pid: int) -> bool:
    """Whether no process of that number runs (an unreaped zombie does not run)."""
    states = [state for state, number, _ in processes() if number == pid]
    return not states or states[0] == "Z"


def starved(pid: int) -> float:
    """Return the seconds that its main thread was runnable but had no CPU; only Linux tells."""
    with suppress(FileNotFoundError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def children(parent: int) -> list[int]:
    return [pid for _, pid, its_parent in processes() if its_parent == parent]


def arguments(pid: int) -> list[str]:
    """Return a process's command line as words; empty if the process is gone."""
    path = Path(f"/proc/{pid}/cmdline")
    if Path("/proc/self/cmdline").exists():
        with suppress(FileNotFoundError, ProcessLookupError):
            return path.read_text().split("\0")
        return []
    listed = subprocess.run(("ps", "-o", "args=", "-p", str(pid)), capture_output=True)
    return listed.stdout.decode().split()


def processes() -> Iterator[tuple[str, int, int]]:
    """Yield the state, pid and parent pid of every process."""
    if not Path("/proc/self/stat").exists():  # not Linux
        listed = subprocess.run(("ps", "-A", "-o", "stat=,pid=,ppid="), capture_output=True)
        for line in listed.stdout.decode().splitlines():
            state, pid, parent = line.split()
            yield state[0], int(pid), int(parent)
        return
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            yield state, int(path.parent.name), int(parent)
