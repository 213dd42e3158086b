"""Grammars in the engine: compiled off the step loop, one matcher per sequence, masks for drafts.

The tokens allowed after a text depend only on the grammar and the text, whether its tokens are
committed or draft tokens. If a grammar turns out too complex, only its own sequence ends. Where it
ends depends on the same two, never on draft tokens, clocks or other requests, since the library
counts its work along the text. A time limit on draft tokens only shortens proposals.

An id that the tokenizer lacks is never allowed. EOS is allowed where the grammar accepts; if only
EOS may follow, the sequence is complete and ends (see acceptance) without sampling it.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.errors import ModelError
from engine.grammar.source import GrammarRefused, compile_grammar, sentence
from engine.messages import Grammar, Output
from engine.scheduling.constraint import Bits
from engine.scheduling.sequence import Sequence

MAX_COMPILED = 16  # grammars kept for the next request
WAIT_SECONDS = 0.005  # most time in `wait`, when the step loop is otherwise idle
STACK_BYTES = 16 * 2**20  # of the compiling thread; the front end's check has much less
DRAFT_GRACE_SECONDS = 0.02  # CPU time allowed for draft tokens of a text, and ...
DRAFT_SECONDS_PER_TOKEN = 0.004  # ... this much more for each token of the text
SLOW_SECONDS = 0.004  # CPU time of the text's last token and mask; no speculation above it

NOTHING_ALLOWED = "the grammar allows no token of this model here"


class PendingGrammars:
    """Sequences whose grammar is still being compiled. They wait outside the scheduler and block no
    other sequence. Equal grammars are compiled once, all in one thread; a grammar that cannot be
    compiled ends its own sequences.

    `load` reads the vocabulary, once, for the first grammar. `can_end`: whether the target has an
    EOS."""

    def __init__(self, load: Callable[[], LLTokenizer], *, can_end: bool) -> None:
        self._load = load
        self._can_end = can_end
        self._vocabulary: LLTokenizer | None = None  # used by the thread only
        self._eos: Bits  # of the vocabulary; set before the first grammar is compiled
        self._thread: ThreadPoolExecutor | None = None
        # Matchers at the start of the text, only ever copied.
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._held: dict[str, tuple[Sequence, Future[LLMatcher]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, seq: Sequence) -> None:
        """Hold a sequence with a grammar until `take`."""
        grammar = seq.params.grammar
        assert grammar is not None
        future = self._compiled.pop(grammar, None) or self._submit(grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        self._held[seq.id] = seq, future

    def take(self) -> tuple[list[Sequence], list[Output]]:
        """Return the sequences that may run now, with `constraint` set, and the error outputs of
        those whose grammar failed."""
        ready: list[Sequence] = []
        ends: list[Output] = []
        for seq, compiled in [held for held in self._held.values() if held[1].done()]:
            del self._held[seq.id]
            try:
                matcher, may_end = compiled.result(), self._can_end and not seq.params.ignore_eos
                seq.constraint = GrammarState(matcher, eos=self._eos, may_end=may_end)
                ready.append(seq)
            except (GrammarRefused, ModelError) as error:
                reason = f"the grammar cannot be enforced: {error}"
                end = Output(id=seq.id, finish="error", error=reason, bad_request=True)
                ends.append(end)
        return ready, ends

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """Drop and return these sequences; cancel compilations that no other one needs. Those that
        have begun continue, for later requests."""
        gone = [self._held.pop(id) for id in ids if id in self._held]
        wanted = {id(compiled) for _, compiled in self._held.values()}
        for seq, compiled in gone:
            if id(compiled) not in wanted and compiled.cancel() and seq.params.grammar is not None:
                self._compiled.pop(seq.params.grammar, None)
        return [seq for seq, _ in gone]

    def wait(self) -> None:
        """Wait until a compilation ends, at most WAIT_SECONDS."""
        futures = [compiled for _, compiled in self._held.values()]
        concurrent.futures.wait(futures, WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)

    def _submit(self, grammar: Grammar) -> Future[LLMatcher]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._thread.submit(self._work, grammar)  # the first one starts the thread
        finally:
            threading.stack_size(before)

    def _work(self, grammar: Grammar) -> LLMatcher:
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
                self._eos = eos_bits(self._vocabulary)
            matcher = compile_grammar(grammar, self._vocabulary)
            matcher.compute_bitmask()  # the first one is the slowest; copies keep its results
        except (GrammarRefused, ModelError):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarRefused(f"the compiler failed on it: {sentence(str(error))}") from None
        return matcher


class GrammarState:
    """A Constraint: the grammar state of one sequence. `eos`: bits of the ids that end a text;
    without `may_end` they are never allowed, and a text ends only when it is complete.

    Two matchers, both copies of `fresh`. `_text` follows only the committed text: mask, token,
    mask. It alone decides which tokens are allowed and whether the text exceeds the library's
    limits. Some of these count work that a matcher remembers (lexer states), so a matcher that had
    followed draft tokens would reach them elsewhere. `_walker` follows draft tokens, and is rolled
    back to where two paths diverge."""

    def __init__(
        self,
        fresh: LLMatcher,
        *,
        eos: Bits,
        may_end: bool,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.error: str | None = None
        self._text = fresh.deep_copy()
        self._length = 0  # tokens of the text
        self._walker: LLMatcher | None = None
        self._committed: list[int] = []  # the text's tokens after the walker's base
        self._path: list[int] = []  # tokens that the walker has consumed after its base
        self._eos = eos
        self._may_end = may_end
        self._clock = clock
        self._seconds = 0.0  # spent on draft tokens
        self._last = 0.0  # spent on the text's last token and mask
        # (allowed, complete) by draft tokens after the text.
        self._rows: dict[tuple[int, ...], tuple[Bits, bool] | None] = {}

    @property
    def is_slow(self) -> bool:
        share = DRAFT_GRACE_SECONDS + DRAFT_SECONDS_PER_TOKEN * self._length
        return self._seconds > share or self._last > SLOW_SECONDS

    def allowed(self, path: Seq[int]) -> Bits | None:
        row = self._row(path)
        return None if row is None else row[0]

    def is_complete(self, path: Seq[int]) -> bool:
        row = self._row(path)
        return row is not None and row[1]

    def extend(self, token: int) -> None:
        self._row(())  # always, as in plain decoding, so that `_text` counts the same work
        if self.error:
            return
        started = self._clock()
        taken = self._text.try_consume_tokens([token])
        self._last = self._clock() - started
        if not taken:
            self.error = sentence(self._text.get_error()) or NOTHING_ALLOWED
            return
        self._length += 1
        self._committed.append(token)
        self._rows = {}

    def forced(self, limit: int, path: Seq[int] = ()) -> list[int]:
        if self._row(path) is None or self.is_slow:
            return []
        started = self._clock()
        walker, arrived = self._walk(path)
        tokens: list[int] = walker.compute_ff_tokens()[:limit] if arrived else []
        self._seconds += self._clock() - started
        return tokens

    def _row(self, path: Seq[int]) -> tuple[Bits, bool] | None:
        """Return (allowed, complete) after `path`, or None if `path` is not allowed."""
        if self.error:
            return None
        key = tuple(path)
        if key not in self._rows:
            started = self._clock()
            self._rows[key] = self._draft_row(path) if path else self._mask(self._text)
            took = self._clock() - started
            if path:
                self._seconds += took
            else:
                self._last += took
        return self._rows[key]

    def _mask(self, matcher: LLMatcher) -> tuple[Bits, bool] | None:
        # The library's mask has an extra word if the vocabulary size is a multiple of 32.
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: len(self._eos)]
        if not matcher.is_error():
            without_eos = bits & ~self._eos
            if without_eos.any():
                return (bits if self._may_end else without_eos), False
            if matcher.is_accepting():
                return bits, True
        if matcher is self._text:
            self.error = sentence(matcher.get_error()) or NOTHING_ALLOWED
        return None

    def _draft_row(self, path: Seq[int]) -> tuple[Bits, bool] | None:
        """`_row` for draft tokens. At the time limit or after an error, nothing is allowed: the
        proposal ends here, and a commit computes the mask anew."""
        nothing = np.zeros_like(self._eos), False
        if self.is_slow:
            return nothing
        walker, arrived = self._walk(path)
        row = self._mask(walker) if arrived else None
        if walker.is_error():  # a limit or a dead end; the walker cannot recover
            self._walker = None
            return nothing
        return row if row or not arrived else nothing

    def _walk(self, path: Seq[int]) -> tuple[LLMatcher, bool]:
        """Move the walker to the end of `path`; return it, and whether it got there."""
        if self._walker is None:
            self._walker, self._path, self._committed = self._text.deep_copy(), [], []
        whole, committed = [*self._committed, *path], len(self._committed)
        pairs = zip(self._path, whole, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if back := len(self._path) - common:
            self._walker.rollback(back)
        missing = whole[common:]
        taken = self._walker.try_consume_tokens(missing) if missing else 0
        self._path = whole[: common + taken]
        if len(self._path) >= committed:
            self._path, self._committed = self._path[committed:], []
        return self._walker, taken == len(missing)


def eos_bits(vocabulary: LLTokenizer) -> Bits:
    """Return the bits of the ids that end a text."""
    size = vocabulary.vocab_size
    flags = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    flags[[i for i in vocabulary.eos_tokens if i < size]] = 1
    return np.packbits(flags, bitorder="little")
