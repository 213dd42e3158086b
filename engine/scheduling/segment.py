"""What a forward computes of one sequence, as plain numbers: a stretch of tokens, or the start of a
chain of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHAIN = [*range(-1, 1 << 12)]  # longer than any proposal: parents; from the second on, nodes


class Segment(NamedTuple):
    """One sequence's part of one forward: `tokens` at KV indices `start ..`, in the block table
    `blocks`. The last `num_logits` rows meet the LM head. The trailing `len(tail_parents)` tokens
    are tree nodes (parent -1: the last token before the tail); None: a chain."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logits: int
    tail_parents: Sequence[int] | None = None


class Start(NamedTuple):
    """Where a sequence's next token will stand, and the blocks that hold it and what follows."""

    blocks: Sequence[int]
    position: int


LAST = -1  # in place of a layer: what the last norm makes of the last layer's rows


class HiddenRows(NamedTuple):
    """Which hidden states a forward leaves: those behind each of these `layers`, side by side, of
    `every` row or of those that meet the LM head."""

    layers: tuple[int, ...]
    every: bool = False

    def count(self, segments: Sequence[Segment]) -> int:
        return sum(len(s.tokens) if self.every else s.num_logits for s in segments)


def ancestors_of(parents: Sequence[int]) -> list[list[int]]:
    """The nodes above each node, nearest last; parents precede their children."""
    above: list[list[int]] = []
    for node, parent in enumerate(parents):
        assert -1 <= parent < node
        above.append([] if parent < 0 else [*above[parent], parent])
    return above


def is_chain(parents: Sequence[int] | None) -> bool:
    return not parents or [*parents] == CHAIN[: len(parents)]
