"""The values that describe one step: who runs, which positions, how many guesses. Pure data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Compute positions `start .. start+length` of `seq`; if that reaches the end of the sequence
    the chunk samples, and up to `k` proposed nodes may follow it in the same forward."""

    seq: Sequence
    start: int
    length: int
    k: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        return self.start + self.length == len(self.seq.tokens)


class StepPlan(msgspec.Struct, frozen=True):
    """A plan can be printed, compared in a test and replayed in a bug report."""

    chunks: list[Chunk] = []
    preempted: list[Sequence] = []
    admitted: list[Sequence] = []  # these left the queue for this step

    @property
    def num_tokens(self) -> int:
        """Rows of the target's forward if every proposal comes out full."""
        return sum(c.length + c.k for c in self.chunks)
