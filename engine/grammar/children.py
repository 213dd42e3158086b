"""A forked child for each grammar that is checked: a fork of a warm process takes milliseconds, and
what compiles a stranger's grammar may hang, swell or crash.

Promises: every grammar gets one answer. Its own faults are final: computing for too long (counted
in CPU time, so a busy machine does not matter), too much memory, a crash. That there was no time
for it is not. The young go first: who has run for a while yields the processor and, when all places
are taken, its place.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.child.parent import die_with_parent
from engine.messages import CheckOutcome, Grammar

PLACES = 8
YOUNG_SECONDS = 0.1  # on the clock; most grammars are compiled by then
PATIENCE = 4.0  # on the clock, times the CPU time that is allowed
LOOK_SECONDS = 0.02  # between two looks at the clock
NICENESS = 5  # of one that is not young any more, beside others
MEMORY_BYTES = 2**28  # address space beyond what the vocabulary took
MAX_FILES = 256  # more than this process ever has open
BUSY = "too many grammars are being compiled; try again"

Tell = Callable[[int, str, CheckOutcome], None]  # id, "" or a sentence


@dataclass(slots=True)
class _Child:
    id: int
    asked: float
    pid: int
    pipe: int
    started: float
    said: bytes = b""
    is_nice: bool = False
    is_over: bool = False  # killed, and about to end


class Children:
    """`work` answers in the child; `tell` gets every answer. `seconds`: CPU time of each. Their
    pipes are registered with `selector`, whose events belong to `read`."""

    def __init__(
        self,
        work: Callable[[Grammar], str],
        tell: Tell,
        *,
        seconds: float,
        selector: selectors.BaseSelector,
    ) -> None:
        self._work = work
        self._tell = tell
        self._seconds = seconds
        self._selector = selector
        self._running: dict[int, _Child] = {}  # by pipe
        self._waiting: deque[tuple[float, int, Grammar]] = deque()

    def add(self, id: int, grammar: Grammar) -> None:
        self._waiting.append((time.monotonic(), id, grammar))

    def look(self) -> float | None:
        """Do what is due; seconds until the next look, None while there is nothing to look for."""
        now = time.monotonic()
        late = now - PATIENCE * self._seconds
        for child in list(self._running.values()):
            if child.is_over:
                continue
            if child.asked <= late:
                self._end(child)
            elif now - child.started > YOUNG_SECONDS and self._num_alive > 1:
                self._demote(child)
        while self._waiting and self._waiting[0][0] <= late:
            self._tell(self._waiting.popleft()[1], BUSY, "busy")
        while self._waiting and (self._num_alive < PLACES or self._make_room(now)):
            self._start(*self._waiting.popleft())
        return LOOK_SECONDS if self._running or self._waiting else None

    def read(self, pipe: int) -> None:
        """A child said something, or has ended."""
        child = self._running[pipe]
        if data := os.read(pipe, 65536):
            child.said += data
            return
        status = self._forget(child)
        if child.is_over:
            pass
        elif child.said:
            sentence = child.said.decode("utf-8").removeprefix("=")
            self._tell(child.id, sentence, "refused" if sentence else "accepted")
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            sentence = f"it took longer than {self._seconds:g} s of computing to compile"
            self._tell(child.id, sentence, "too_slow")
        else:
            self._tell(child.id, "it is too complex to compile", "refused")

    def _start(self, asked: float, id: int, grammar: Grammar) -> None:
        receive, send = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(receive)
            os.close(send)
            self._tell(id, BUSY, "busy")
            return
        if not pid:
            self._be_child(send, grammar)
        os.close(send)
        self._running[receive] = _Child(id, asked, pid, receive, time.monotonic())
        self._selector.register(receive, selectors.EVENT_READ)

    def _be_child(self, send: int, grammar: Grammar) -> None:
        """Never returns."""
        status = 1
        try:
            die_with_parent()
            os.closerange(3, send)  # what belongs to the parent
            os.closerange(send + 1, MAX_FILES)
            limit_memory()
            signal.setitimer(signal.ITIMER_PROF, self._seconds)  # SIGPROF ends the process
            os.write(send, f"={self._work(grammar)}".encode())
            status = 0
        finally:
            os._exit(status)

    @property
    def _num_alive(self) -> int:
        return sum(not child.is_over for child in self._running.values())

    def _make_room(self, now: float) -> bool:
        alive = [child for child in self._running.values() if not child.is_over]
        oldest = min(alive, key=lambda child: child.started)
        if now - oldest.started < YOUNG_SECONDS:
            return False
        self._end(oldest)
        return True

    def _end(self, child: _Child) -> None:
        """Its end is read like any other: what is large and nice takes a while to die."""
        child.is_over = True
        os.kill(child.pid, signal.SIGKILL)
        self._tell(child.id, BUSY, "busy")

    def _demote(self, child: _Child) -> None:
        if not child.is_nice:
            child.is_nice = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)

    def _forget(self, child: _Child) -> int:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._running[child.pipe]
        return os.waitpid(child.pid, 0)[1]


def limit_memory() -> None:
    """To what this process has by now, and MEMORY_BYTES."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
