"""The plan of one step: which sequences, which positions, how many draft tokens. Plain data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Compute positions `start .. start+length` of `seq`. If they reach its end the chunk samples,
    and up to `k` draft tokens may follow in the same forward."""

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
    """The scheduler's decisions for one step."""

    chunks: list[Chunk] = []
    preempted: list[Sequence] = []
    admitted: list[Sequence] = []  # from the queue, in this step
