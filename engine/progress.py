"""How far the start of an engine has come. Whoever works tells; an engine process passes it on to
its front end, which draws it or logs it. By way of a logger, so that no function on the way down to
a loop has to know; where nobody listens, nothing happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


def tell(stage: str, done: int = 0, total: int = 0) -> None:
    """`stage`: what is done now; `total`: 0 where it is not known."""
    logger.debug("%s", stage, extra={"told": (stage, done, total)})


def counted(stage: str, items: Collection[Item]) -> Iterator[Item]:
    """The items; told is how many are done."""
    for number, item in enumerate(items):
        tell(stage, number, len(items))
        yield item
    tell(stage, len(items), len(items))


class _Listener(logging.Handler):
    def __init__(self, hear: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(*record.told)  # type: ignore[attr-defined]


@contextmanager
def heard(hear: Callable[[str, int, int], None]) -> Iterator[None]:
    """Meanwhile `hear` gets what is told, in the thread that tells it, and no log does."""
    listener = _Listener(hear)
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
