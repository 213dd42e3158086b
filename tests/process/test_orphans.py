"""An engine process must not outlive its parent, or it would hold the GPU for ever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from engine.config import EngineConfig
from tests.process.harness import is_gone, short_folder, until
from tests.support.scripted import COMMAND, Script

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import asyncio, sys
from tests.process.harness import supervised
from tests.support.scripted import Script

async def main():
    async with supervised(Script(start_seconds=float(sys.argv[1]))) as home:
        while home.supervisor.pid is None:
            await asyncio.sleep(0.01)
        if sys.argv[1] == "0":
            await home.reach("ready")
        print(home.supervisor.pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def killed_parent(start_seconds: str) -> int:
    """Start a parent with its engine, kill the parent by SIGKILL, and return the engine's pid."""
    with subprocess.Popen(
        (sys.executable, "-c", PARENT, start_seconds), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    return pid


def test_the_engine_ends_with_a_killed_parent() -> None:
    """A killed front end cannot tell the engine to stop; the engine notices by itself."""
    pid = killed_parent("0")
    asyncio.run(until(lambda: is_gone(pid)))


def test_an_engine_that_is_still_loading_ends_too() -> None:
    """The engine watches its parent even before the model is loaded."""
    pid = killed_parent("3600")
    asyncio.run(until(lambda: is_gone(pid)))


def test_the_end_of_stdin_ends_the_engine_in_the_middle_of_a_step() -> None:
    """A closed pipe is enough (no Linux needed), even when the loop hangs."""
    with short_folder() as folder:
        config = folder / "engine.json"
        config.write_text(EngineConfig().model_dump_json())
        endpoints = ("--commands", f"ipc://{folder}/c", "--events", f"ipc://{folder}/e")
        child = subprocess.Popen(
            (*COMMAND, "--config", str(config), *endpoints),
            stdin=subprocess.PIPE,
            env=Script(start_seconds=3600).environment(),
        )
        try:
            assert child.stdin is not None
            child.stdin.close()
            assert child.wait(timeout=60) == 1
        finally:
            child.kill()
            child.wait()


def test_python_m_engine_with_a_bad_configuration_is_one_line() -> None:
    """Started by hand, it prints one sentence on stderr and exits with 2, without a traceback."""
    with short_folder() as folder:
        config = folder / "engine.json"
        config.write_text('{"colour": "red"}')
        endpoints = ("--commands", f"ipc://{folder}/c", "--events", f"ipc://{folder}/e")
        done = subprocess.run(
            (sys.executable, "-m", "engine", "--config", str(config), *endpoints),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "ERROR engine.process: the engine stops: engine.json: colour: Extra inputs are not "
        "permitted (given: 'red')"
    )
