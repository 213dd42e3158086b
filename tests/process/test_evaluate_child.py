"""The engine child of `foredraft evaluate` when it does not do what it should."""

from __future__ import annotations

import sys

import pytest

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.lab.evaluate_messages import Batch, Mode
from server.lab.evaluate.child import Child

READY = """
import sys
from engine.lab.evaluate_messages import Batch, Start, receive, send
from tests.support.fake_client import make_ready
receive(sys.stdin.buffer, Start)
send(sys.stdout.buffer, make_ready())
receive(sys.stdin.buffer, Batch)
"""


def child(code: str) -> Child:
    return Child(EngineConfig(), command=[sys.executable, "-c", code])


@pytest.mark.parametrize("code", ["", "import sys; sys.exit(3)"])
def test_one_that_ends_at_once_is_a_sentence(code: str) -> None:
    """Law: its exit code is named; nobody waits for an answer that will not come."""
    expected = f"exit code {3 if code else 0}"
    with pytest.raises(EngineError, match=expected), child(code):
        raise AssertionError("it never was ready")


def test_one_that_is_lost_in_the_middle_is_a_sentence() -> None:
    """Law: the same while it works."""
    with child(READY + "sys.exit(9)") as lab, pytest.raises(EngineError, match="exit code 9"):
        lab.run(Batch(Mode("off"), [], 1))


def test_one_that_hangs_is_ended_with_the_evaluation() -> None:
    """Law: leaving kills it, even if it does not listen."""
    with child(READY + "import time; time.sleep(600)") as lab:
        process = lab._process
        assert lab.ready.k_max == 4
    assert process.returncode is not None


def test_its_parent_is_told_why_there_is_no_engine() -> None:
    """Law: the engine's own sentence is the command's."""
    code = """
import sys
from engine.lab.evaluate_messages import Start, receive, send
from engine.messages import Fatal
receive(sys.stdin.buffer, Start)
send(sys.stdout.buffer, Fatal("there are no weights"))
"""
    with pytest.raises(EngineError, match="^there are no weights$"), child(code):
        raise AssertionError("it never was ready")
