"""Grammars at work: compiled off the step loop, a matcher per sequence, masks along a proposal.

Promises: what is allowed after some tokens depends on the grammar and those tokens alone, whether
they are committed or only proposed; a sequence whose grammar takes more than its share of the
step's time, or turns out too complex, is ended, and no other notices. Neither depends on guesses:
what those cost is no part of the share (too much of it ends the guessing), and what breaks over one
is made anew. The matcher walks along with the questions: it is rolled back to where two proposals
part.

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
GUESSES_SHARE = 0.25  # of both, for guesses that were not kept; then there are no more guesses

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
            self.matcher,
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
    """A Constraint: one sequence's matcher, a copy of `fresh`. `eos` are the bits of the ids that
    end a text; without `may_end` they are never allowed, and only what is complete ends."""

    def __init__(
        self,
        fresh: LLMatcher,
        seq: Sequence,
        *,
        eos: Bits,
        may_end: bool,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.error: str | None = None
        self.is_slow = False
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._seq = seq
        self._eos = eos
        self._may_end = may_end
        self._clock = clock
        self._spent = 0.0  # on what was committed
        self._wasted = 0.0  # on guesses that were not kept
        self._costs: dict[tuple[int, ...], float] = {}  # of guesses whose fate is open
        self._tried = False  # whether the matcher has been where the text did not go
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
        self._waste(self._clock() - started)
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
        bits = self._mask(path)
        if self._matcher.is_error():
            bits = self._recover(path)
        self._charge(tuple(path), self._clock() - started)
        if bits is None:
            return None
        going_on = bits & ~self._eos
        if going_on.any():
            return (bits if self._may_end else going_on), False
        complete = self._path == list(path) and self._matcher.is_accepting()
        if not complete and not path:
            self.error = NOTHING_ALLOWED
        return bits, complete

    def _mask(self, path: Seq[int]) -> Bits | None:
        if not self._go(path):
            return None
        # Where the vocabulary's size is a multiple of 32 the library's mask has a word too many.
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: len(self._eos)]

    def _recover(self, path: Seq[int]) -> Bits | None:
        """The matcher broke at its limits, for good. If it had been elsewhere that may be why, so a
        new one is asked. Behind guesses nothing may follow: they are not gone beyond, and whoever
        stands there asks again."""
        reason = sentence(self._matcher.get_error())
        if path:
            self.is_slow = True
            self._renew()
            return np.zeros_like(self._eos)
        if self._tried and self._renew():
            bits = self._mask(path)
            if not self._matcher.is_error():
                return bits
        self.error = reason
        return None

    def _renew(self) -> bool:
        """A matcher that has been nowhere but at the committed text; False if it cannot be."""
        start = self._seq.num_prompt
        output = self._seq.tokens[start : start + self._committed]
        self._matcher, self._path, self._tried = self._fresh.deep_copy(), [], False
        return self._matcher.try_consume_tokens(output) == len(output)

    def _catch_up(self) -> None:
        """Take in what was committed since the last question; most of it was asked about."""
        output = self._seq.tokens[self._seq.num_prompt + self._committed :]
        if not output or self.error:
            return
        started = self._clock()
        self._committed += len(output)
        if not self._go(output) and not (self._tried and self._renew()):
            self.error = NOTHING_ALLOWED
        self._path = []
        known = self._rows.get(tuple(output))
        # Where nothing seemed to be allowed it is looked again, for the reason.
        self._rows = {(): known} if known is not None and (known[1] or known[0].any()) else {}
        self._settle(tuple(output))
        self._charge((), self._clock() - started)

    def _go(self, path: Seq[int]) -> bool:
        """Move the matcher to behind `path`; False if it cannot get there."""
        pairs = zip(self._path, path, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if back := len(self._path) - common:
            self._matcher.rollback(back)
            self._tried = True
            del self._path[common:]
        missing = list(path[common:])
        if missing:
            taken = self._matcher.try_consume_tokens(missing)
            self._path += missing[:taken]
            return taken == len(missing)
        return True

    def _charge(self, path: tuple[int, ...], seconds: float) -> None:
        if path:
            self._costs[path] = self._costs.get(path, 0.0) + seconds
            return
        self._spent += seconds
        if self._spent > self._share():
            self.error = self.error or TOO_SLOW

    def _settle(self, output: tuple[int, ...]) -> None:
        """`output` is what became of the guesses."""
        for path, seconds in self._costs.items():
            if path == output[: len(path)]:
                self._spent += seconds
            else:
                self._waste(seconds)
        self._costs = {}

    def _waste(self, seconds: float) -> None:
        self._wasted += seconds
        if self._wasted > GUESSES_SHARE * self._share():
            self.is_slow = True

    def _share(self) -> float:
        return GRACE_SECONDS + SECONDS_PER_TOKEN * self._seq.num_output


def _bits(ids: Seq[int], size: int) -> Bits:
    flags = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    flags[[i for i in ids if i < size]] = 1
    return np.packbits(flags, bitorder="little")
