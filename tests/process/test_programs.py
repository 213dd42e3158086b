"""Offline commands are children of `foredraft`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

_PARENT = """
from server.cli import run_program
setup = "import os, time; print(os.getpid(), flush=True)"
raise SystemExit(run_program("timeit", ["-n1", "-r1", "-s", setup, "time.sleep(60)"]))
"""


def test_a_program_ends_with_its_parent() -> None:
    """Bug: SIGTERM, which a supervisor sends to one process, ended `foredraft bench` and left the
    program that it had started running."""
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
