"""Progress of the engine's start: the code that works reports it, and an engine process sends it to
its front end, which draws or logs it. Reports go through a logger, so that no function needs a
callback argument; without a listener nothing happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Report that `done` of `total` items (0: not known) of the current stage are done."""
    logger.debug("%s", stage, extra={"progress": (stage, done, total)})


def counted(stage: str, items: Collection[Item]) -> Iterator[Item]:
    """Yield the items, reporting how many are done."""
    for number, item in enumerate(items):
        report(stage, number, len(items))
        yield item
    report(stage, len(items), len(items))


class _Listener(logging.Handler):
    def __init__(self, callback: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self._callback = callback

    def emit(self, record: logging.LogRecord) -> None:
        self._callback(*record.progress)  # type: ignore[attr-defined]


@contextmanager
def reported_to(callback: Callable[[str, int, int], None]) -> Iterator[None]:
    """While active, pass reports to `callback`, in the reporting thread, instead of a log."""
    listener = _Listener(callback)
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
