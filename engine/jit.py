"""The one way in which Python is compiled here: numba, for this processor, kept between starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def _date() -> tuple[tuple[float, int], ...]:
    """Of all files with compiled code. numba's own is that of one file, whoever it calls."""
    names = ("kernels*.py", "tiles.py", "vectors.py")
    files = [file for name in names for file in _ENGINE.glob(f"*/{name}")]
    return tuple((stat.st_mtime, stat.st_size) for stat in (file.stat() for file in sorted(files)))


_ENGINE = Path(__file__).parent
_DATE = _date()


def fast(function: Callable[..., Any]) -> Any:
    """Compiled at the first call, or kept from before as long as no file with compiled code has
    changed. Where nothing can be written, the code is not kept."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc", "nsz"},
    }
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for the cache
        return numba.njit(**options)(function)
    compiled._cache._cache_file._source_stamp = _DATE
    return compiled
