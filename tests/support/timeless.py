"""An event loop without waiting: its clock stands still while anything can run, and then jumps to
the next timer. So sleeps and deadlines pass in their order, however slow the machine is.

For code that waits for timers only. They would overtake I/O and threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.DefaultSelector):
    """`now` grows by the seconds that `select` should have waited. Without a limit it waits."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if not found:
            self.now += max(timeout, 0.0)
        return found


class _TimelessLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine like `asyncio.run`, but in no time."""
    with asyncio.Runner(loop_factory=_TimelessLoop) as runner:
        return runner.run(main)
