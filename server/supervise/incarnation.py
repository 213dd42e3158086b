"""Incarnation: one engine process, from spawn to its clean-up. Owned by the supervisor.

Guarantees: endpoints and configuration are in a private (0700) folder of its own, so no message of
another incarnation can arrive; `close` leaves neither a process nor the folder. The child's stdin
is a pipe without data: the child exits when it closes, which also happens if this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.messages import Fatal

STDERR = 2  # the file descriptor
MAX_FOLDER_BYTES = 80  # the path of a Unix socket has at most 107 bytes


class Incarnation:
    """Usage: create, connect the client to `commands` and `events`, `spawn`, and always `close`.

    `ready`: it serves; `over`: it exited or sent Fatal; `seen`: it sent an event since the last
    check.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) > MAX_FOLDER_BYTES:
            base = "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="foredraft-", dir=base))
        self.commands = f"ipc://{self.folder}/commands"
        self.events = f"ipc://{self.folder}/events"
        self.ready, self.over = asyncio.Event(), asyncio.Event()
        self.fatal: Fatal | None = None
        self.seen = False
        self._waited = 0
        self._process: asyncio.subprocess.Process | None = None
        self._stdin: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number if a signal ended it."""
        return self._process.returncode if self._process is not None else None

    async def spawn(
        self, command: Sequence[str], config: EngineConfig, measured: bytes = b""
    ) -> None:
        """Start `command --config .. --commands .. --events ..`. `measured`: step costs from an
        earlier engine of this configuration, passed with `--measured`. Raises OSError."""
        path, known = self.folder / "engine.json", self.folder / "measured"
        path.write_text(config.model_dump_json(), encoding="utf-8")
        known.write_bytes(measured)
        read_end, self._stdin = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *("--config", str(path), "--commands", self.commands, "--events", self.events),
                *(("--measured", str(known)) if measured else ()),
                stdin=read_end,
                stdout=STDERR,  # only the front end writes to stdout
                start_new_session=True,  # Ctrl-C in the terminal reaches only the front end
            )
        finally:
            os.close(read_end)
        self._exit = asyncio.create_task(self._process.wait())
        self._exit.add_done_callback(lambda exit: self.over.set())

    def cpu_wait(self) -> float:
        """Return the seconds since the last call for which its main thread was runnable but waited
        for a CPU (from Linux's `schedstat`, in nanoseconds; 0 elsewhere)."""
        try:
            waited = int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0.0
        before, self._waited = self._waited, waited
        return (waited - before) / 1e9

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it (Linux; False elsewhere)."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state == "T"

    async def close(self) -> None:
        """Kill what still runs (the whole session of the child), reap it, remove the folder."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        if self._process is not None:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def how_it_ended(exit_code: int) -> str:
    """Return a sentence for the operator and for clients with open requests."""
    if exit_code >= 0:
        return f"the engine process exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (by hand, or because memory ran out)" if name == "SIGKILL" else ""
    return f"the engine process was killed by {name}{hint}"
