"""`python -m engine.grammar.check PATH`: a child process of the front end that checks whether
grammars can be enforced. It reads the tokenizer once and forks for each grammar: a fork of a warm
process takes milliseconds, and compiling a user's grammar may hang, use too much memory or crash.

stdin: [id, Grammar]; stdout, in any order: [id, sentence, outcome], with an empty sentence for an
accepted grammar. The first answer, with id 0, is about the tokenizer. Every message is msgpack
after its length in four bytes. The process ends with its stdin or its parent.

Every grammar gets an answer, from its fork if possible. A grammar's own faults are final: too much
CPU time (so a busy machine does not matter), too much memory, or a crash. "busy" is not final.
Young forks come first: an older one gets a lower priority, and is killed if its place is needed.
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

STACK_BYTES = 2 * 2**20  # less than the engine's, so that a deep grammar fails here
MEMORY_BYTES = 2**28  # address space beyond that of the vocabulary
MAX_FORKS = 8  # most forks at a time
YOUNG_SECONDS = 0.1  # wall-clock time; most grammars compile in less
PATIENCE = 4.0  # wall-clock time per grammar, in multiples of the allowed CPU time
POLL_SECONDS = 0.02  # interval between calls of `poll`
NICENESS = 5  # of a fork that is no longer young
WALKS = 2  # through a compiled grammar, of STEPS tokens each
STEPS = 24
MAX_FORCED_BYTES = 4096
BUSY = "too many grammars are being compiled; try again"


def main() -> int:
    parser = Parser(prog="python -m engine.grammar.check")
    parser.add_argument("path")
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--seconds", type=number(0, above=True), required=True, help="CPU seconds per grammar"
    )
    args = parser.parse_args()
    for each in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and may still need this
        signal.signal(each, signal.SIG_IGN)
    die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # keep a library's prints out of the answers
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
        if select.select([0], [], [], checks.poll())[0]:
            head = _read(4)
            data = _read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
            if not data:
                return 0
            checks.add(*msgspec.msgpack.decode(data, type=tuple[int, Grammar]))


@dataclass(slots=True)
class _Fork:
    id: int
    requested: float
    started: float
    is_over: bool = False  # killed, but not reaped yet


class Checks:
    """The running and waiting checks. `seconds`: CPU time of each."""

    def __init__(self, vocabulary: LLTokenizer, answers: int, seconds: float) -> None:
        self._vocabulary, self._answers, self._seconds = vocabulary, answers, seconds
        self._forks: dict[int, _Fork] = {}  # by process id
        self._waiting: deque[tuple[float, int, Grammar]] = deque()

    def add(self, id: int, grammar: Grammar) -> None:
        self._waiting.append((time.monotonic(), id, grammar))

    def poll(self) -> float | None:
        """Reap, end and start forks; return the seconds until the next call, None if idle."""
        self._reap()
        now = time.monotonic()
        late = now - PATIENCE * self._seconds
        for pid, fork in self._running().items():
            if fork.requested <= late:
                self._end(pid)
            elif now - fork.started > YOUNG_SECONDS:
                with contextlib.suppress(OSError):  # this process may be nicer already
                    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        while self._waiting and self._waiting[0][0] <= late:
            _write(self._answers, self._waiting.popleft()[1], BUSY, "busy")
        while self._waiting and (len(self._running()) < MAX_FORKS or self._make_room(now)):
            self._start(*self._waiting.popleft())
        return POLL_SECONDS if self._forks or self._waiting else None

    def _reap(self) -> None:
        """Collect ended forks, and answer for those that could not."""
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

    def _running(self) -> dict[int, _Fork]:
        return {pid: fork for pid, fork in self._forks.items() if not fork.is_over}

    def _make_room(self, now: float) -> bool:
        pid, oldest = next(iter(self._running().items()))
        if now - oldest.started < YOUNG_SECONDS:
            return False
        self._end(pid)
        return True

    def _end(self, pid: int) -> None:
        """Kill a fork and answer "busy". A large, nice process takes a while to end."""
        fork = self._forks[pid]
        fork.is_over = True
        os.kill(pid, signal.SIGKILL)
        _write(self._answers, fork.id, BUSY, "busy")

    def _start(self, requested: float, id: int, grammar: Grammar) -> None:
        try:
            pid = os.fork()
        except OSError:
            _write(self._answers, id, BUSY, "busy")
            return
        if pid:
            self._forks[pid] = _Fork(id, requested, time.monotonic())
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
    """Return why the grammar cannot be enforced, in one sentence, or "". Deep recursion in the
    library overflows the stack and ends the process, and so do its panics."""
    try:
        probe(compile_grammar(grammar, vocabulary), vocabulary)
    except GrammarRefused as error:
        return str(error)
    return ""


def probe(matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
    """Follow some pseudo-random texts, always the same ones: a grammar may compile fast and still
    be too expensive to use. Raises GrammarRefused if it is too complex, allows nothing, or forces
    too much text at once."""
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
            without_eos = [token for token in allowed.tolist() if token not in ends]
            if len(without_eos) < len(allowed) and not walker.is_accepting():
                raise GrammarRefused("it has an end-of-text token where the text may not end")
            if not without_eos:
                break
            walker.consume_token(rng.choice(without_eos))
            require_no_error(walker)


def set_limits() -> None:
    """Limit address space to its present size plus MEMORY_BYTES, and the stack to STACK_BYTES."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_STACK, STACK_BYTES)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def _read(count: int) -> bytes:
    """Read `count` bytes of stdin; fewer at its end."""
    data = b""
    while len(data) < count and (more := os.read(0, count - len(data))):
        data += more
    return data


def _write(answers: int, id: int, sentence: str, outcome: CheckOutcome) -> None:
    """Write an answer in one call: a pipe takes up to 4,096 bytes atomically, so answers of several
    forks do not mix."""
    data = msgspec.msgpack.encode((id, sentence[:1000], outcome))
    os.write(answers, struct.pack("<I", len(data)) + data)


if __name__ == "__main__":
    sys.exit(main())
