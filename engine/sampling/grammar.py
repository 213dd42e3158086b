"""Grammars at work: compiled off the step loop, a matcher per sequence, masks along a proposal.

Promises: what is allowed after some tokens depends on the grammar and those tokens alone, whether
they are committed or only proposed; a sequence whose grammar takes more than its share of the
step's time, or turns out too complex, is ended, and no other notices. The matcher walks along with
the questions: it is rolled back to where two proposals part, and never fed what was rejected.

An id that the tokenizer lacks is never allowed. EOS is allowed where the grammar accepts; when
nothing else may follow, the sequence is complete and ends (see acceptance) without sampling it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.constraint import Bits
from engine.errors import ModelError
from engine.messages import Grammar
from engine.sampling.grammar_source import GrammarRefused, compile_grammar, sentence
from engine.sequence import Sequence

MAX_COMPILED = 16  # grammars kept for the next request
STACK_BYTES = 16 * 2**20  # of the compiling thread; the front end's check had much less
GRACE_SECONDS = 0.5  # CPU time that a sequence's grammar may take, and ...
SECONDS_PER_TOKEN = 0.02  # ... this much more for each token

TOO_SLOW = "the grammar takes too long to follow"
NOTHING_ALLOWED = "the grammar allows nothing that this model could say here"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar ready for use: `state` makes what one sequence needs."""

    matcher: LLMatcher  # at the start of the text, never moved
    vocabulary: LLTokenizer

    def state(self, seq: Sequence, *, can_end: bool) -> GrammarState:
        """`can_end`: whether the target has an EOS at all, by which a text may end."""
        return GrammarState(
            self.matcher.deep_copy(),
            seq,
            eos=_bits(self.vocabulary.eos_tokens, self.vocabulary.vocab_size),
            may_end=can_end and not seq.params.ignore_eos,
        )


class GrammarCompiler:
    """`load` reads the vocabulary, once, when the first grammar comes. One thread compiles."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._vocabulary: LLTokenizer | None = None  # the thread's own
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """The same grammar is compiled once; `result` raises GrammarRefused or ModelError."""
        future = self._compiled.pop(grammar, None)
        if future is None:
            future = self._submit(grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def _submit(self, grammar: Grammar) -> Future[Compiled]:
        if self._thread is not None:
            return self._thread.submit(self._work, grammar)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._thread.submit(self._work, grammar)  # starts the thread
        finally:
            threading.stack_size(before)

    def _work(self, grammar: Grammar) -> Compiled:
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            matcher = compile_grammar(grammar, self._vocabulary)
            matcher.compute_bitmask()  # the first one is the slowest; copies have what it found
        except (GrammarRefused, ModelError):
            raise
        except BaseException as error:  # a panic of the library derives from nothing better
            raise GrammarRefused(f"the compiler failed on it: {sentence(str(error))}") from None
        return Compiled(matcher, self._vocabulary)


class GrammarState:
    """A Constraint: one sequence's matcher. `eos` are the bits of the ids that end a text; without
    `may_end` they are never allowed, and only what is complete ends."""

    def __init__(
        self,
        matcher: LLMatcher,
        seq: Sequence,
        *,
        eos: Bits,
        may_end: bool,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._seq = seq
        self._eos = eos
        self._may_end = may_end
        self._clock = clock
        self._spent = 0.0
        self._committed = 0  # output tokens that the matcher has behind it
        self._path: list[int] = []  # proposed ones that it consumed after them
        self._rows: dict[tuple[int, ...], tuple[Bits, bool] | None] = {}  # allowed, complete

    def allowed(self, path: Seq[int]) -> Bits | None:
        row = self._row(path)
        return None if row is None else row[0]

    def is_complete(self, path: Seq[int]) -> bool:
        row = self._row(path)
        return row is not None and row[1]

    def forced(self, limit: int, path: Seq[int] = ()) -> list[int]:
        self._row(path)
        if self.error or not self._go(path):
            return []
        started = self._clock()
        tokens: list[int] = self._matcher.compute_ff_tokens()[:limit]
        self._charge(started)
        return tokens

    def _row(self, path: Seq[int]) -> tuple[Bits, bool] | None:
        """What may follow, and whether nothing may but the end."""
        self._catch_up()
        key = tuple(path)
        if key not in self._rows:
            self._rows[key] = self._look(path)
        return self._rows[key]

    def _look(self, path: Seq[int]) -> tuple[Bits, bool] | None:
        if self.error:
            return None
        started = self._clock()
        if not self._go(path):
            return None
        # Where the vocabulary's size is a multiple of 32 the library's mask has a word too many.
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits: Bits = mask[: len(self._eos)]
        self._charge(started)
        if self._matcher.is_error():
            self.error = sentence(self._matcher.get_error())
            return None
        going_on = bits & ~self._eos
        if going_on.any():
            return (bits if self._may_end else going_on), False
        complete = self._matcher.is_accepting()
        if not complete and not path:
            self.error = NOTHING_ALLOWED
        return bits, complete

    def _catch_up(self) -> None:
        """Take in what was committed since the last question; most of it was asked about."""
        output = self._seq.tokens[self._seq.num_prompt + self._committed :]
        if not output or self.error:
            return
        started = self._clock()
        if not self._go(output):
            self.error = NOTHING_ALLOWED
        self._charge(started)
        known = self._rows.get(tuple(output))
        self._rows = {} if known is None else {(): known}
        self._committed += len(output)
        self._path = []

    def _go(self, path: Seq[int]) -> bool:
        """Move the matcher to behind `path`; False if it cannot get there."""
        pairs = zip(self._path, path, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if back := len(self._path) - common:
            self._matcher.rollback(back)
            del self._path[common:]
        missing = list(path[common:])
        if missing:
            taken = self._matcher.try_consume_tokens(missing)
            self._path += missing[:taken]
            return taken == len(missing)
        return True

    def _charge(self, started: float) -> None:
        self._spent += self._clock() - started
        if self._spent > GRACE_SECONDS + SECONDS_PER_TOKEN * self._seq.num_output:
            self.error = self.error or TOO_SLOW


def _bits(ids: Seq[int], size: int) -> Bits:
    flags = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    flags[[i for i in ids if i < size]] = 1
    return np.packbits(flags, bitorder="little")
