"""Compile Python with numba for this processor, and cache the code between starts. Also logs the
compilation of a first start, which takes about a minute."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba.core import caching, event

from engine.errors import one_line
from engine.progress import report

logger = logging.getLogger(__name__)

FEATURES = llvmlite.binding.get_host_cpu_features()
if FEATURES.get("avx512f") and not (numba.config.CPU_NAME or numba.config.CPU_FEATURES):
    numba.config.CPU_FEATURES = FEATURES.flatten() + ",-prefer-256-bit"  # else loops use 8 lanes

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)


def _grants_tiles() -> bool:
    """Request AMX tiles from Linux, as a process must before using them. Return whether it may."""
    here = (sys.platform, platform.machine()) == ("linux", "x86_64")
    if not (here and FEATURES.get("amx-tile", False) and FEATURES.get("amx-bf16", False)):
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    return refused == 0


HAS_TILES = _grants_tiles()
# CPU features (Intel and AMD, then ARM) with which a processor multiplies numbers of a dtype.
_PRODUCTS = {"bfloat16": ("avx512bf16", "amx-bf16", "bf16"), "float16": ("avx512fp16", "fullfp16")}


def multiplies(dtype: str) -> bool:
    """Whether this processor has multiply instructions for `dtype`."""
    return dtype == "float32" or any(FEATURES.get(name, False) for name in _PRODUCTS[dtype])


def _source_stamp() -> tuple[tuple[float, int], ...]:
    """Return the cache stamp: mtime and size of all files whose code or constants are compiled, and
    of this one (numba's own stamp covers one file, not its callees), and whether AMX is available:
    code cached with AMX runs only with AMX."""
    names = ("kernels*.py", "vectors.py", "jit.py")
    files = [file for name in names for at in (name, f"*/{name}") for file in _ENGINE.glob(at)]
    stats = [file.stat() for file in sorted(files)]
    return (*((stat.st_mtime, stat.st_size) for stat in stats), (0.0, int(HAS_TILES)))


_ENGINE = Path(__file__).parents[1]
_DATE = _source_stamp()


def fast(function: Callable[..., Any], *, allocates: bool = True) -> Any:
    """Return the function compiled: at its first call, or from the cache while no file with
    compiled code has changed. Without a writable folder, nothing is cached.

    No fast-math: operations are rounded, and sums are taken, as written. Fresh and cached code are
    optimised differently (a function may be inlined in one only), so with fast-math a seed would
    give another text after the first start."""
    compiled = numba.njit(nogil=True, error_model="numpy", _nrt=allocates)(function)
    with suppress(RuntimeError):  # no writable cache folder
        compiled._cache = _SafeCache(function)
        compiled._cache._cache_file._source_stamp = _DATE
    return compiled


# For functions that allocate nothing: counting references takes longer than a row's arithmetic.
fast_in_place = partial(fast, allocates=False)


def is_cached(function: Any) -> bool:
    """Whether a `fast` function is in the cache, or cannot be cached at all."""
    kept = function._cache
    if not isinstance(kept, _SafeCache):
        return True
    with suppress(Exception):  # unpickling raises what a damaged file makes it raise
        return bool(kept._cache_file._load_index())
    return False


class _ExistingCache(caching.InTreeCacheLocator):  # type: ignore[misc]
    """Locates an existing cache, also in a read-only installation."""

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        provided = caching.UserProvidedCacheLocator if numba.config.CACHE_DIR else cls
        found = provided(function, file)
        return found if _holds_code(found.get_cache_path()) else None


@cache
def _holds_code(folder: str) -> bool:
    return any(Path(folder).glob("*.nbi"))


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ExistingCache, *caching.CompileResultCacheImpl._locator_classes)


class _SafeCache(caching.FunctionCache):  # type: ignore[misc]
    """A cache whose errors never stop the engine: unreadable code is compiled again, and code that
    cannot be written is used without being cached."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling raises what a damaged file makes it raise
            index = self._cache_file._index_path
            logger.warning("cached code is damaged, moved aside: %s (%s)", index, one_line(error))
            with suppress(OSError):
                os.replace(index, f"{index}.damaged")

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _cannot_keep(self.cache_path, str(error.strerror))


@cache
def _cannot_keep(folder: str, error: str) -> None:
    logger.warning("compiled code cannot be cached in %s (%s): every start compiles", folder, error)


class _CompileLogger(event.Listener):  # type: ignore[misc]
    """Logs once that functions are being compiled, and reports progress for each."""

    def __init__(self) -> None:
        self._count = 0

    def on_start(self, event: Any) -> None:
        self._count += 1
        report("compiling for this processor: functions", self._count)
        if self._count > 1:
            return
        folder = getattr(event.data["dispatcher"]._cache, "cache_path", None)
        logger.info(
            "compiling for this processor, which takes a minute or so of a core's time: %s",
            f"once, since it is kept in {folder} for later starts" if folder
            else "at every start, since no cache folder is writable (set NUMBA_CACHE_DIR)",
        )  # fmt: skip

    def on_end(self, event: Any) -> None:
        pass


def logged_compilation() -> AbstractContextManager[object]:
    """Log one line when the first function is compiled, none if all code was cached."""
    hook: AbstractContextManager[object] = event.install_listener("numba:compile", _CompileLogger())
    return hook
