"""The event loop of a front end: uvloop's where there is one (not on Windows)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# What a worker thread waits for the interpreter at most, and the loop for it to give it back. By
# Python's default of 5 ms a prompt's way through a thread takes longer than all else before its
# first token, as soon as others stream.
SWITCH_SECONDS = 0.0005


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with asyncio.Runner(loop_factory=_factory()) as runner:
            return runner.run(main)
    finally:
        main.close()  # it has ended, or was interrupted before it began


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
