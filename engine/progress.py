"""Progress of the engine's start: the code that works reports it, and an engine process sends it to
its front end, which draws or logs it. The listener belongs to the process, so that no function
needs a callback argument; without a listener nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

Item = TypeVar("Item")
Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []
_lock = Lock()  # a listener may send through a socket, which one thread at a time may use


def report(stage: str, done: int = 0, total: int = 0) -> None:
    """Report that `done` of `total` items (0: not known) of the current stage are done."""
    with _lock:
        for listener in _listeners:
            listener(stage, done, total)


def counted(stage: str, items: Collection[Item]) -> Iterator[Item]:
    """Yield the items, reporting how many are done."""
    for number, item in enumerate(items):
        report(stage, number, len(items))
        yield item
    report(stage, len(items), len(items))


@contextmanager
def reported_to(listener: Listener) -> Iterator[None]:
    """While active, pass reports to `listener`, in the reporting threads."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
