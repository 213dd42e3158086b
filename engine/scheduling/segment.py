"""A forward's work for one sequence, as plain numbers: a range of tokens, or the start of a chain
of draft steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHAIN = [*range(-1, 1 << 12)]  # parents of the longest chain; from index 1 on, its nodes


class Window(NamedTuple):
    """Sliding-window attention: to the last `tokens`, in whole blocks of `block_size`, and to the
    first block, the attention sink (arXiv:2309.17453)."""

    tokens: int
    block_size: int

    def of(self, blocks: Sequence[int], start: int) -> tuple[Sequence[int], int]:
        """Return the blocks that a row at `start` sees, and how many tokens the others hold."""
        others = (start - self.tokens) // self.block_size - 1
        if others <= 0:
            return blocks, 0
        return [*blocks[:1], *blocks[1 + others :]], others * self.block_size


class Segment(NamedTuple):
    """One sequence's part of a forward: `tokens` at positions `start ..`. `blocks`: its block
    table, without the blocks of the `left_out` tokens before them. The last `num_logits` rows get
    logits. `tail_parents`: the last tokens are nodes of a tree with these parents (-1: the last
    token before the tree); None: a chain."""

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
    """The position of a sequence's next token, and the blocks for it and the tokens after it;
    `left_out` as in Segment."""

    blocks: Sequence[int]
    position: int
    left_out: int = 0

    def within(self, window: Window) -> Start:
        blocks, left_out = window.of(self.blocks, self.position)
        return self._replace(blocks=blocks, left_out=left_out)


LAST = -1  # stands for the last layer's output after the final norm


class HiddenRows(NamedTuple):
    """Which hidden states a forward returns: the outputs of these `layers`, concatenated, for
    `every` row or only for rows with logits."""

    layers: tuple[int, ...]
    every: bool = False

    def count(self, segments: Sequence[Segment]) -> int:
        return sum(len(s.tokens) if self.every else s.num_logits for s in segments)


def ancestors_of(parents: Sequence[int]) -> list[list[int]]:
    """Return the ancestors of each node, nearest last; parents precede their children."""
    ancestors: list[list[int]] = []
    for node, parent in enumerate(parents):
        assert -1 <= parent < node
        ancestors.append([] if parent < 0 else [*ancestors[parent], parent])
    return ancestors


def is_chain(parents: Sequence[int] | None) -> bool:
    return not parents or [*parents] == CHAIN[: len(parents)]
