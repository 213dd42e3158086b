"""What a child process asks of its operating system: to end with its parent, whatever it is doing;
its share of the CPU cores, as torch's number of threads; and huge pages.

torch starts as many threads as the machine has cores. In a container with a quota of two cores on
a machine with sixty-four, the sixty-four threads take turns on two and every step waits for the
slowest. Free of torch, which reads the environment once, when it is imported.
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
LOADING = "draft"  # the thread that reads another draft while the engine steps

_PR_SET_PDEATHSIG = 1

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

CGROUP = Path("/sys/fs/cgroup")

_HUGE_PAGE = 1 << 21  # bytes
_LEAST = 2 * _HUGE_PAGE  # of a stretch: to ask takes some 5 ms of each, and there are many
_COLLAPSE = 25  # of Linux's madvise, since 6.1
_MAPS = Path("/proc/self/maps")


def follow_parent() -> bool:
    """Make this process end with its parent, even in the middle of a step. Call it first. Returns
    whether there is one that started it by program.

    Twice, for two failures: a thread waits for the end of stdin when that is a pipe (works
    everywhere, needs the interpreter), and on Linux the kernel kills (needs nothing of us).
    Ctrl-C in a terminal is the parent's to handle: it drains.
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
    """On Linux, have the kernel kill this process when its parent ends; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_with_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(EXIT_ORPHANED)


# Of control groups, versions 2 and 1: a quota and its period in microseconds.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def engine_threads(cgroup: Path = CGROUP) -> int:
    """All cores but one, of the affinity mask and no more than the control group's quota: the front
    end needs a core, and threads of one product that share a core with anything wait for each
    other in every layer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    granted = cores or 1
    for files in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`: no limit
            said = " ".join((cgroup / name).read_text() for name in files)
            quota, period = map(int, said.split())
            granted = min(granted, quota // period) if quota > 0 else granted
    return max(1, granted - 1)


def limit_threads(threads: int | None, environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads: to `threads`, or to `engine_threads` unless they are
    set. Call before torch is imported."""
    if threads is None:
        if VARIABLES[0] in environment:
            return
        threads = engine_threads()
    for name in VARIABLES:
        environment[name] = str(threads)


def freeze_memory() -> threading.Thread:
    """The garbage collector never walks it in the middle of a step again, and once the thread has
    ended, it lies in huge pages where Linux makes some of small ones: behind a forward a page's
    place has to be looked up anew, and Python's objects, read in every step, are thousands of small
    pages."""
    gc.collect()
    gc.freeze()
    gathering = threading.Thread(target=_gather, name="huge-pages", daemon=True)
    gathering.start()
    return gathering


def _gather() -> None:
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


def leave(code: int) -> NoReturn:
    """Exit. Python would cut off the thread that loads a draft, whose libraries then abort."""
    if any(thread.name == LOADING for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)
    sys.exit(code)
