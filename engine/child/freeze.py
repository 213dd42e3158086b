"""Memory of what was built at start: frozen for the garbage collector, and in huge pages."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_HUGE_PAGE = 1 << 21  # bytes
_LEAST = 2 * _HUGE_PAGE  # of a stretch: to ask takes some 5 ms of each, and there are many
_COLLAPSE = 25  # of Linux's madvise, since 6.1
_MAPS = Path("/proc/self/maps")


def freeze_memory() -> None:
    """The garbage collector never walks it in the middle of a step again, and it lies in huge pages
    where Linux makes some of small ones: behind a forward a page's place has to be looked up anew,
    and Python's objects, read in every step, are thousands of small pages."""
    gc.collect()
    gc.freeze()
    if not _MAPS.exists():  # not Linux
        return
    advise = ctypes.CDLL(None).madvise
    for line in _MAPS.read_text().splitlines():
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(end, 16) for end in span.split("-"))
            first += -first % _HUGE_PAGE
            size = last // _HUGE_PAGE * _HUGE_PAGE - first
            if size >= _LEAST:  # what it cannot do it leaves as it is
                advise(ctypes.c_void_p(first), ctypes.c_size_t(size), _COLLAPSE)
