"""The server's process: started, held to one core, its CPU seconds read, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError

END_SECONDS = 30


@dataclass(frozen=True)
class Server:
    """Of a running server; its engine is another process."""

    pid: int
    address: tuple[str, int]

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def hold_to(self, core: int) -> None:
        """All its threads, those of libraries too."""
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.sched_setaffinity(int(thread), {core})

    def children(self) -> list[int]:
        """Its engine, and what compiles grammars."""
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in found.split()]


@contextmanager
def running(*, step_seconds: float, tokens_per_step: int, times: Path) -> Iterator[Server]:
    """Ready when entered, gone when left. Raises EngineError when it does not start."""
    command = [sys.executable, "-m", "server.lab.bench.front.serve"]
    command += ["--step-seconds", str(step_seconds), "--tokens-per-step", str(tokens_per_step)]
    command += ["--times", str(times)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().strip().rpartition(":")
            if not host:
                raise EngineError("the server did not start; it said why above")
            yield Server(process.pid, (host, int(port)))
            process.send_signal(signal.SIGTERM)
            process.wait(END_SECONDS)
        finally:
            process.kill()
