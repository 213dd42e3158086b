"""The log announces compilation, which takes a minute or more at a first start."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core import event

from engine.cpu.jit import logged_compilation


def compiling(folder: str | None = "/kept") -> Any:
    """Send the events that numba emits around the compilation of one function."""
    dispatcher = SimpleNamespace(_cache=SimpleNamespace(cache_path=folder))
    return event.trigger_event("numba:compile", data={"dispatcher": dispatcher})


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "engine.cpu.jit")
    return caplog


def test_compilation_is_logged_once(lines: pytest.LogCaptureFixture) -> None:
    """Bug: a first start was silent for 88 seconds. Nested compilation logs nothing more."""
    with logged_compilation():
        with compiling(), compiling():
            assert "once, since it is kept in /kept for later starts" in lines.messages[0]
        with compiling():
            pass
    assert len(lines.messages) == 1


def test_cached_code_logs_nothing(lines: pytest.LogCaptureFixture) -> None:
    with logged_compilation():
        pass
    with compiling():  # no handler is listening any more
        pass
    assert lines.messages == []


def test_it_logs_that_no_cache_is_writable(lines: pytest.LogCaptureFixture) -> None:
    with logged_compilation(), compiling(None):
        pass
    assert "at every start, since no cache folder is writable" in lines.messages[0]
