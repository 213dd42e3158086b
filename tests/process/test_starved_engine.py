"""An engine that gets no CPU is not one that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from server.supervise.incarnation import Incarnation
from tests.process.harness import PATIENCE

SPIN = "import os; os.sched_setaffinity(0, {{{cpu}}}); os.nice({nice})\nwhile True: pass"

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="only Linux says who waits for a CPU"
)


@pytest.fixture
def cpu() -> Iterator[int]:
    """Return a CPU that two other processes keep busy."""
    found = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", SPIN.format(cpu=found, nice=0)]
    others = [subprocess.Popen(command) for _ in range(2)]
    yield found
    for other in others:
        other.kill()
        other.wait()


def test_waiting_for_a_cpu_is_distinguished_from_hanging(cpu: int) -> None:
    """Bug: on a fully loaded machine the watchdog killed a healthy engine. Law: a stopped engine
    has no wait for a CPU."""

    async def scenario() -> tuple[float, float]:
        incarnation = Incarnation()
        try:
            command = (sys.executable, "-c", SPIN.format(cpu=cpu, nice=19))
            await incarnation.spawn(command, EngineConfig())
            busy = 0.0
            async with asyncio.timeout(PATIENCE):
                while busy <= 1.0:
                    await asyncio.sleep(0.1)
                    busy += incarnation.cpu_wait()
            assert incarnation.pid is not None
            os.kill(incarnation.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            incarnation.cpu_wait()
            await asyncio.sleep(1.0)
            return busy, incarnation.cpu_wait()
        finally:
            await incarnation.close()

    busy, stopped = asyncio.run(scenario())
    assert busy > 1.0
    assert stopped == 0.0
