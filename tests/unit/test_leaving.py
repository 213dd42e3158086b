"""How the engine process exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from engine.child import LOADING, exit_process
threading.Thread(target=threading.Event().wait, name={name}, daemon={daemon}).start()
exit_process(3)
"""


@pytest.mark.parametrize(
    ("name", "daemon"), [("LOADING", False), ("LOADING", True), ("None", True)]
)
def test_it_exits_whatever_is_being_loaded(name: str, daemon: bool) -> None:
    """Bug: an engine told to exit while loading a draft aborted, because Python cut the thread off.
    Law: it exits with its own code and does not wait for a thread (here it never ends)."""
    program = PROGRAM.format(name=name, daemon=daemon)
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")
