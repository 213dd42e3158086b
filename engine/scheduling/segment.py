"""What a forward computes of one sequence, as plain numbers: a stretch of tokens, or the start of a
chain of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHAIN = [*range(-1, 1 << 12)]  # longer than any proposal: parents; from the second on, nodes


class Window(NamedTuple):
    """What a model attends to: the last `tokens`, in whole blocks of `block_size`, and the first
    block, on which attention leans whatever it holds (sinks, arXiv:2309.17453)."""

    tokens: int
    block_size: int

    def of(self, blocks: Sequence[int], start: int) -> tuple[Sequence[int], int]:
        """Of a sequence's blocks those that its row at `start` sees, and how many tokens the others
        hold."""
        others = (start - self.tokens) // self.block_size - 1
        if others <= 0:
            return blocks, 0
        return [*blocks[:1], *blocks[1 + others :]], others * self.block_size


class Segment(NamedTuple):
    """One sequence's part of one forward: `tokens` at positions `start ..`, in the block table
    `blocks`, without those of `left_out` tokens before them. The last `num_logits` rows meet the LM
    head. The trailing `len(tail_parents)` tokens are tree nodes (parent -1: the last token before
    the tail); None: a chain."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logits: int
    tail_parents: Sequence[int] | None = None
    left_out: int = 0

    def within(self, window: Window) -> Segment:
        blocks, left_out = window.of(self.blocks, self.start)
        return self._replace(blocks=blocks, left_out=left_out)


class Start(NamedTuple):
    """Where a sequence's next token will stand, and the blocks that hold it and what follows;
    `left_out` as of Segment."""

    blocks: Sequence[int]
    position: int
    left_out: int = 0

    def within(self, window: Window) -> Start:
        blocks, left_out = window.of(self.blocks, self.position)
        return self._replace(blocks=blocks, left_out=left_out)


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
