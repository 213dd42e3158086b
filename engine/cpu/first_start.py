"""What the first start does in silence otherwise: a minute and more of compiling. Tells the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core import event

logger = logging.getLogger(__name__)

_COMPILE = "numba:compile"  # not when kept code is read


class _Told(event.Listener):  # type: ignore[misc]
    """Functions that compile others first are counted with these, their time once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._depth = 0
        self._begin = 0.0
        self._functions, self._seconds = 0, 0.0
        self._kept: Path | None = None

    def on_start(self, event: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begin = self._clock()
        if self._functions == 0:
            self._kept = _folder(event.data["dispatcher"])
            logger.info(
                "compiling for this processor, which takes a minute or two of a core's time: %s",
                f"once, since it is kept in {self._kept} for later starts" if self._kept
                else "at every start, since it can be kept nowhere (NUMBA_CACHE_DIR names a place)",
            )  # fmt: skip
        self._functions += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += self._clock() - self._begin

    def tell(self) -> None:
        if self._functions:
            count, seconds = self._functions, self._seconds
            logger.info("compiled %d functions in %.0f s of processor time", count, seconds)


@contextmanager
def telling_what_compiles(clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """One line when the first function is compiled, one at the end; none where all was kept.
    `clock`: seconds of the processor."""
    told = _Told(clock)
    with event.install_listener(_COMPILE, told):
        yield
    told.tell()


def _folder(dispatcher: Any) -> Path | None:
    path = getattr(dispatcher._cache, "cache_path", None)
    return Path(path) if path else None
