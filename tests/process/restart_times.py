"""`python -m tests.process.restart_times [COUNT]`: kills the engine of the built-in pair COUNT (5)
times. Prints the seconds from each kill until a request is answered, the CPU seconds that the new
engine has used by then, and the line that it logs about its start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.process.served import serving

FIRST = "server.restart_window_seconds=0.001"  # each restart is the first in a row
COMMAND = (sys.executable, "-m", "server", "serve", "--port", "0", "--set", FIRST)
BODY = {"model": "foredraft-demo", "prompt": "def add(a, b):\n", "max_tokens": 1}
PAUSE = 2.0  # seconds between a restart and the next kill


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def restarts(count: int) -> tuple[list[tuple[float, float]], list[str]]:
    """Return each restart's wall and engine CPU seconds, and the log lines of all starts."""
    took = list[tuple[float, float]]()
    with tempfile.TemporaryFile() as log:
        async with serving(COMMAND, os.environ, log=log) as server:
            for _ in range(count):
                await asyncio.sleep(PAUSE)
                began = time.monotonic()
                os.kill(server.engine, signal.SIGKILL)
                reply = await server.http.post("/v1/completions", json=BODY)
                took.append((time.monotonic() - began, cpu_seconds(server.engine)))
                assert reply.status_code == 200, reply.text
        log.seek(0)
        lines = log.read().decode().splitlines()
    return took, [line for line in lines if "steps timed in" in line]


def main() -> None:
    took, lines = asyncio.run(restarts(int(sys.argv[1]) if sys.argv[1:] else 5))
    for name, column in zip(("the clock", "its CPU time"), zip(*took, strict=True), strict=True):
        each = ", ".join(f"{seconds:.1f}" for seconds in column)
        lines.append(f"to an answer, by {name}: {statistics.median(column):.2f} s of {each}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
