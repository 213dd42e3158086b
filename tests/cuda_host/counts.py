"""The stand-in's counts, read from within the child process."""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import engine

ENGINE = str(Path(engine.__file__ or "").parent) + "/"
DRAWS = ("best_of_blocks", "best_of_rows")
DEPTH = 3  # innermost functions of ours that identify a place

_Watcher = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p)


class StandIn:
    """The preloaded library. `lap` returns the counts since the last `lap`."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(None)
        for name in ("report", "violations", "kernels"):
            getattr(self._library, f"standin_{name}").restype = ctypes.c_char_p
        self._watcher: Any = None
        self.violations: list[str] = []  # up to the last lap

    @property
    def counts(self) -> Counter[str]:
        return Counter(json.loads(self._library.standin_report()))

    @property
    def captured(self) -> Counter[str]:
        """Kernels of the last capture by mangled name, without copies."""
        found: Counter[str] = Counter()
        for line in self._library.standin_kernels(1).decode().splitlines():
            number, name = line.split(" ", 1)
            found[name] = int(number)
        return found

    @property
    def drawing(self) -> int:
        """Kernels of the last capture that draw tokens (engine.sampling.triton_draws.draw)."""
        return sum(n for name, n in self.captured.items() if name in DRAWS)

    def lap(self) -> Counter[str]:
        counts = self.counts
        self.violations += self._library.standin_violations().decode().splitlines()
        self._library.standin_reset()
        return counts

    @contextmanager
    def watched(self) -> Iterator[dict[tuple[str, str], list[int]]]:
        """Collect the number and bytes of each thing counted outside captures, by what it is and by
        the functions of `engine` that asked for it, innermost first."""
        found: dict[tuple[str, str], list[int]] = {}

        def seen(what: bytes, size: int, kernel: bytes) -> None:
            each = found.setdefault((what.decode(), place(sys._getframe(1))), [0, 0])
            each[0] += 1
            each[1] += size

        self._watcher = _Watcher(seen)
        self._library.standin_watch(self._watcher)
        try:
            yield found
        finally:
            self._library.standin_watch(None)


def place(frame: FrameType | None) -> str:
    found: list[str] = []
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        if code.co_filename.startswith(ENGINE):
            file = code.co_filename.removeprefix(ENGINE) if not found else ""
            found.append(f"{file} {code.co_qualname}".strip())
        frame = frame.f_back
    return " < ".join(found) or "elsewhere"
