"""How a child process ends with its parent, whatever it is doing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
import threading

EXIT_ORPHANED = 1

_PR_SET_PDEATHSIG = 1


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
