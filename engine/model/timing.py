"""How long forwards took: by the clock on a CPU, by events on CUDA, where nobody waits to know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class HostTimer:
    """`with` it around a forward; `read` answers the last one's seconds, as often as it is
    asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._seconds = 0.0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._seconds = self._clock() - self._began

    def read(self) -> float:
        return self._seconds

    def wait(self) -> None:
        """Until what was begun has ended, which it has."""


class DeviceTimer:
    """`read` answers, once, the seconds of the forwards that the device has finished since it was
    last asked; the others are told the next time."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._open: list[tuple[Any, Any]] = []  # torch's events have no types

    def __enter__(self) -> None:
        pair = self._make(), self._make()
        pair[0].record()
        self._open.append(pair)

    def __exit__(self, *_: object) -> None:
        self._open[-1][1].record()

    def read(self) -> float:
        milliseconds = 0.0
        while self._open and self._open[0][1].query():
            first, last = self._open.pop(0)
            milliseconds += first.elapsed_time(last)
        return milliseconds / 1e3

    def wait(self) -> None:
        if self._open:
            self._open[-1][1].synchronize()
