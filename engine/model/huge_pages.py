"""Memory in huge pages. A page's place has to be looked up, on a virtual machine twice, and what a
forward reads is more pages of 4 KiB than processors know the places of."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 1 << 21  # bytes
_LINE = 64  # of a cache: no vector is to lie across two


def space(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes of zeros, in huge pages where Linux has some for who asks: from the border of
    one on, or none would be whole. What is smaller than half of one begins where a line of a cache
    does."""
    if 2 * size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _from_border(np.zeros(size + _LINE, np.uint8), _LINE, size)
    pages = -(-size // HUGE_PAGE)
    whole = mmap.mmap(-1, (pages + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that has none
        whole.madvise(mmap.MADV_HUGEPAGE)
    return _from_border(np.frombuffer(whole, np.uint8), HUGE_PAGE, size)


def _from_border(memory: npt.NDArray[np.uint8], of: int, size: int) -> npt.NDArray[np.uint8]:
    first = -memory.ctypes.data % of
    return memory[first : first + size]
