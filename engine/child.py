"""Setup of a child process: it ends with its parent even while busy, torch gets as many threads as
there are CPU cores, and the heap moves into huge pages.

torch starts as many threads as the machine has cores. In a container with a quota of two cores on a
machine with sixty-four, the sixty-four threads take turns on two and every step waits for the
slowest. Does not import torch, which reads the environment once, on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

EXIT_ORPHANED = 1
LOADING = "draft"  # name of the thread that loads another draft while the engine steps

_PR_SET_PDEATHSIG = 1

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

CGROUP = Path("/sys/fs/cgroup")

_HUGE_PAGE = 1 << 21  # bytes
_LEAST = 2 * _HUGE_PAGE  # smallest mapping to move: a call takes 5 ms, and there are many
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_MAPS = Path("/proc/self/maps")


def follow_parent() -> bool:
    """Make this process end with its parent, even in the middle of a step. Call it first. Returns
    whether a program started it (stdin is a pipe).

    Two mechanisms cover two failures: a thread exits the process at the end of stdin (works on
    every system, needs the interpreter), and on Linux the kernel kills the process (works even if
    it is stuck). Ctrl-C is ignored here: the parent handles it by draining.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        piped = stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:  # no stdin at all
        piped = False
    if not piped:
        return False  # started by hand
    die_with_parent()
    threading.Thread(target=_exit_with_stdin, name="parent-watch", daemon=True).start()
    return True


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent ends; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_with_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(EXIT_ORPHANED)


# Files with a quota and its period in microseconds: control groups v2, then v1.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def engine_threads(cgroup: Path = CGROUP) -> int:
    """Return the number of torch threads: the cores of the affinity mask, at most the control
    group's quota, less one for the front end. If one torch thread shares a core with other work,
    all others wait for it in every layer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = cores or 1
    for files in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`: no limit
            text = " ".join((cgroup / name).read_text() for name in files)
            quota, period = map(int, text.split())
            usable = min(usable, quota // period) if quota > 0 else usable
    return max(1, usable - 1)


def limit_threads(threads: int | None, environment: MutableMapping[str, str]) -> None:
    """Set the environment variables that torch reads to `threads`. With None, to `engine_threads()`
    unless OMP_NUM_THREADS is set. Call before torch is imported."""
    if threads is None:
        if VARIABLES[0] in environment:
            return
        threads = engine_threads()
    for name in VARIABLES:
        environment[name] = str(threads)


def freeze_memory() -> threading.Thread:
    """Exclude existing objects from garbage collection, which would interrupt a step, and start a
    thread that moves the heap into huge pages (Linux only): each step reads Python objects on
    thousands of small pages, whose TLB entries every forward evicts."""
    gc.collect()
    gc.freeze()
    thread = threading.Thread(target=_collapse_heap, name="huge-pages", daemon=True)
    thread.start()
    return thread


def _collapse_heap() -> None:
    if not _MAPS.exists():  # not Linux
        return
    advise = ctypes.CDLL(None).madvise
    for line in _MAPS.read_text().splitlines():
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(end, 16) for end in span.split("-"))
            first += -first % _HUGE_PAGE
            size = last // _HUGE_PAGE * _HUGE_PAGE - first
            if size >= _LEAST:  # a failure changes nothing
                advise(ctypes.c_void_p(first), ctypes.c_size_t(size), _COLLAPSE)


def exit_process(code: int) -> NoReturn:
    """Exit with `code`. While a draft loads, skip Python's shutdown: it would stop the loading
    thread inside a library that then aborts."""
    if any(thread.name == LOADING for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)
    sys.exit(code)
