"""Which blocks hold which sequence, as compiled code reads it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class BlockTables:
    """Kept from one forward to the next, in most of which the same sequences have the same blocks:
    numbers that Python holds are dear to hand over."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: list[Sequence[int]] = []  # by row
        self._table = np.zeros((0, 0), dtype=np.int64)

    def of(self, needed: Sequence[tuple[Sequence[int], int]]) -> Integers:
        """`[sequences, blocks]` from each one's blocks and length; what stands in a row behind its
        blocks means nothing. Written over by the next call."""
        shape = len(needed), max([len(blocks) for blocks, _ in needed])
        if self._table.shape != shape:
            self._table, self._known = np.zeros(shape, dtype=np.int64), [()] * len(needed)
        known = self._known
        for row, (blocks, length) in enumerate(needed):
            assert len(blocks) * self._block_size >= length
            if blocks != known[row]:
                self._table[row, : len(blocks)] = blocks
                known[row] = list(blocks)
        return self._table
