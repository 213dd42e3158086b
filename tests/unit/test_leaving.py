"""How the engine process exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from engine.child import LOADING, leave
threading.Thread(target=threading.Event().wait, name={name}, daemon={daemon}).start()
leave(3)
"""


@pytest.mark.parametrize(
    ("name", "daemon"), [("LOADING", False), ("LOADING", True), ("None", True)]
)
def test_it_exits_whatever_is_being_loaded(name: str, daemon: bool) -> None:
    """Bug: told to end while it loaded a draft, the engine aborted: Python cut the thread off. Law:
    its code is told, and nobody waits for the thread, which here would never end."""
    program = PROGRAM.format(name=name, daemon=daemon)
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")
