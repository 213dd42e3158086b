"""`python -m engine.grammar.check PATH`: a child of the front end that says whether grammars can be
honoured. It reads the tokenizer once and forks for each grammar: a fork of a warm process takes
milliseconds, and what compiles a stranger's grammar may hang, swell or crash.

stdin: [id, Grammar]; stdout: [id, sentence, outcome], "" for a grammar that can be honoured, in any
order; the first one, with id 0, is about the tokenizer. Every message is msgpack behind four bytes
of length. It ends with its stdin or its parent.

Promises: every grammar gets an answer, which its fork writes itself if it can. A grammar's own
faults are final: computing for too long (counted in CPU time, so a busy machine does not matter),
too much memory, a crash. That there was no time for it is not. The young go first: who has run for
a while yields the processor and, when all places are taken, its place.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import select
import signal
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.arguments import Parser, number
from engine.child import die_with_parent
from engine.errors import ModelError
from engine.grammar.source import GrammarRefused, compile_grammar, require_no_error
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import CheckOutcome, Grammar

STACK_BYTES = 2 * 2**20  # less than the engine's, so that what is deep fails here
MEMORY_BYTES = 2**28  # address space beyond what the vocabulary took
PLACES = 8
YOUNG_SECONDS = 0.1  # on the clock; most grammars are compiled by then
PATIENCE = 4.0  # on the clock, times the CPU time that is allowed
LOOK_SECONDS = 0.02  # between two looks at the clock
NICENESS = 5  # of one that is not young any more
WALKS = 2  # through a compiled grammar, of so many ...
STEPS = 24
MAX_FORCED_BYTES = 4096
BUSY = "too many grammars are being compiled; try again"


def main() -> int:
    parser = Parser(prog="python -m engine.grammar.check")
    parser.add_argument("path")
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--seconds", type=number(0, above=True), required=True, help="CPU time of a grammar"
    )
    args = parser.parse_args()
    for each in (signal.SIGINT, signal.SIGTERM):  # the parent's to handle, which may need this
        signal.signal(each, signal.SIG_IGN)
    die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    try:
        vocabulary = load_vocabulary(
            args.path, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
    except ModelError as error:
        _write(answers, 0, str(error), "refused")
        return 0
    gc.collect()
    gc.freeze()  # so that forks share these pages
    _write(answers, 0, "", "accepted")
    checks = Checks(vocabulary, answers, args.seconds)
    while True:
        if select.select([0], [], [], checks.look())[0]:
            head = _read(4)
            data = _read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
            if not data:
                return 0
            checks.add(*msgspec.msgpack.decode(data, type=tuple[int, Grammar]))


@dataclass(slots=True)
class _Fork:
    id: int
    asked: float
    started: float
    is_over: bool = False  # killed, and about to end


class Checks:
    """`seconds`: CPU time of each."""

    def __init__(self, vocabulary: LLTokenizer, answers: int, seconds: float) -> None:
        self._vocabulary, self._answers, self._seconds = vocabulary, answers, seconds
        self._forks: dict[int, _Fork] = {}  # by process id
        self._waiting: deque[tuple[float, int, Grammar]] = deque()

    def add(self, id: int, grammar: Grammar) -> None:
        self._waiting.append((time.monotonic(), id, grammar))

    def look(self) -> float | None:
        """Do what is due; seconds until the next look, None while there is nothing to look for."""
        self._reap()
        now = time.monotonic()
        late = now - PATIENCE * self._seconds
        for pid, fork in self._alive().items():
            if fork.asked <= late:
                self._end(pid)
            elif now - fork.started > YOUNG_SECONDS:
                with contextlib.suppress(OSError):  # where this process is nicer
                    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        while self._waiting and self._waiting[0][0] <= late:
            _write(self._answers, self._waiting.popleft()[1], BUSY, "busy")
        while self._waiting and (len(self._alive()) < PLACES or self._make_room(now)):
            self._start(*self._waiting.popleft())
        return LOOK_SECONDS if self._forks or self._waiting else None

    def _reap(self) -> None:
        """Tell what became of those that could not say it themselves."""
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            fork = self._forks.pop(pid)
            if fork.is_over or status == 0:
                continue
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                sentence = f"it took longer than {self._seconds:g} s of computing to compile"
                _write(self._answers, fork.id, sentence, "too_slow")
            else:
                _write(self._answers, fork.id, "it is too complex to compile", "refused")

    def _alive(self) -> dict[int, _Fork]:
        return {pid: fork for pid, fork in self._forks.items() if not fork.is_over}

    def _make_room(self, now: float) -> bool:
        pid, oldest = next(iter(self._alive().items()))
        if now - oldest.started < YOUNG_SECONDS:
            return False
        self._end(pid)
        return True

    def _end(self, pid: int) -> None:
        """What is large and nice takes a while to die, and is reaped then."""
        fork = self._forks[pid]
        fork.is_over = True
        os.kill(pid, signal.SIGKILL)
        _write(self._answers, fork.id, BUSY, "busy")

    def _start(self, asked: float, id: int, grammar: Grammar) -> None:
        try:
            pid = os.fork()
        except OSError:
            _write(self._answers, id, BUSY, "busy")
            return
        if pid:
            self._forks[pid] = _Fork(id, asked, time.monotonic())
            return
        status = 1
        try:
            die_with_parent()
            set_limits()
            signal.setitimer(signal.ITIMER_PROF, self._seconds)  # SIGPROF ends the process
            sentence = verdict(grammar, self._vocabulary)
            _write(self._answers, id, sentence, "refused" if sentence else "accepted")
            status = 0
        finally:
            os._exit(status)


def verdict(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    """Empty when the grammar can be honoured, else one sentence. Deep recursion in the library
    overflows the stack and ends the process; so do its panics."""
    try:
        probe(compile_grammar(grammar, vocabulary), vocabulary)
    except GrammarRefused as error:
        return str(error)
    return ""


def probe(matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
    """A grammar may compile in a moment and explode when it is used, so take some steps along
    pseudo-random sentences, always the same ones. Raises GrammarRefused for what turns out too
    complex, allows nothing, or forces more text at once than is reasonable."""
    rng = random.Random(0)
    ends = set(vocabulary.eos_tokens)
    for _ in range(WALKS):
        walker = matcher.deep_copy()
        for step in range(STEPS):
            bits = np.frombuffer(walker.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            require_no_error(walker)
            if not len(allowed):
                raise GrammarRefused(
                    f"after {step} tokens nothing is allowed any more: no text satisfies it"
                )
            if len(walker.compute_ff_bytes()) > MAX_FORCED_BYTES:
                raise GrammarRefused(f"it forces more than {MAX_FORCED_BYTES} bytes at once")
            going_on = [token for token in allowed.tolist() if token not in ends]
            if len(going_on) < len(allowed) and not walker.is_accepting():
                raise GrammarRefused("it has an end-of-text token in it, where no text may end")
            if not going_on:
                break
            walker.consume_token(rng.choice(going_on))
            require_no_error(walker)


def set_limits() -> None:
    """Memory: what this process has by now, and MEMORY_BYTES; the stack: STACK_BYTES."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_STACK, STACK_BYTES)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def _read(count: int) -> bytes:
    """So many bytes of stdin; fewer at its end."""
    data = b""
    while len(data) < count and (more := os.read(0, count - len(data))):
        data += more
    return data


def _write(answers: int, id: int, sentence: str, outcome: CheckOutcome) -> None:
    """At once, so that what forks write does not mix: a pipe takes 4,096 bytes whole."""
    data = msgspec.msgpack.encode((id, sentence[:1000], outcome))
    os.write(answers, struct.pack("<I", len(data)) + data)


if __name__ == "__main__":
    sys.exit(main())
