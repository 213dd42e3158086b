"""The one way in which Python is compiled here: numba, for this processor, kept between starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def fast(function: Callable[..., Any]) -> Any:
    """Compiled at the first call. Where nothing can be written, the code is not kept."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"contract", "reassoc", "nsz"},
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for the cache
        return numba.njit(**options)(function)
