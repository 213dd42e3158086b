"""Offline commands run in place of `foredraft`."""

from __future__ import annotations

import signal
import subprocess
import sys

_COMMAND = """
from server.cli import run_program
setup = "import os, time; print(os.getpid(), flush=True)"
run_program("timeit", ["-n1", "-r1", "-s", setup, "time.sleep(60)"])
"""


def test_a_signal_ends_the_program() -> None:
    """Bug: SIGTERM, which a supervisor sends to one process, ended `foredraft bench` but not the
    program that it had started."""
    command = [sys.executable, "-c", _COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
