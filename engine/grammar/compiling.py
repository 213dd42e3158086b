"""Sequences that may not run yet, since their grammar is still being compiled.

They wait outside of the scheduler: nothing of theirs is computed, and nobody waits for them. A
grammar that cannot be compiled ends its own sequence.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.errors import ModelError
from engine.grammar.compiler import Compiled, GrammarCompiler
from engine.grammar.source import GrammarRefused
from engine.messages import Output
from engine.scheduling.sequence import Sequence

WAIT_SECONDS = 0.005  # before an otherwise idle loop looks again


@dataclass(slots=True)
class _Held:
    seq: Sequence
    compiled: Future[Compiled]


class Compiling:
    """`can_end`: whether the target has an EOS."""

    def __init__(self, compiler: GrammarCompiler, *, can_end: bool) -> None:
        self._compiler = compiler
        self._can_end = can_end
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, seq: Sequence) -> None:
        """Hold a sequence with a grammar until `take`."""
        assert seq.params.grammar is not None
        self._held[seq.id] = _Held(seq, self._compiler.compile(seq.params.grammar))

    def take(self) -> tuple[list[Sequence], list[Output]]:
        """Those that may run, their `constraint` set; and the ends of those that never will."""
        ready: list[Sequence] = []
        ends: list[Output] = []
        for held in [held for held in self._held.values() if held.compiled.done()]:
            seq = self._held.pop(held.seq.id).seq
            try:
                seq.constraint = held.compiled.result().state(seq, can_end=self._can_end)
                ready.append(seq)
            except (GrammarRefused, ModelError) as error:
                sentence = f"the grammar cannot be honoured: {error}"
                end = Output(id=seq.id, finish="error", error=sentence, bad_request=True)
                ends.append(end)
        return ready, ends

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """Let go of these, and of what was to be compiled for nobody else."""
        gone = [self._held.pop(id) for id in ids if id in self._held]
        wanted = {id(held.compiled) for held in self._held.values()}
        for held in gone:
            if id(held.compiled) not in wanted:
                self._compiler.cancel(held.compiled)
        return [held.seq for held in gone]

    def wait(self) -> None:
        """Until something may have changed, but not for long."""
        concurrent.futures.wait(
            [held.compiled for held in self._held.values()],
            timeout=WAIT_SECONDS,
            return_when=concurrent.futures.FIRST_COMPLETED,
        )
