"""Batch: the segments of one forward, packed into one flat row of tokens.

Defines positions, the order of rows, and which rows get logits. A chain is causal. A tree node has
a list of ancestors; its position follows from its depth, its KV slot from its index. Proposals are
unknown here: segments bring parents, and the attention backend builds masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.attention.interface import Span
from engine.scheduling.segment import Segment, ancestors_of, is_chain


@dataclass(frozen=True, slots=True)
class Unseen:
    """Tokens known only on the device: int64 `ids` `[len(rows)]` for these rows of a forward. The
    segments hold zeros in their place."""

    rows: list[int]
    ids: Tensor


@dataclass(frozen=True)
class Batch:
    """`tokens` and `positions` of all rows, and the `rows` that get logits, on the host. Device
    tensors are made on first access, since graphs use their own instead."""

    tokens: list[int]
    positions: list[int]
    rows: list[int]
    spans: list[Span]
    device: torch.device
    unseen: Unseen | None = None

    @classmethod
    def pack(
        cls, segments: Sequence[Segment], device: torch.device, unseen: Unseen | None = None
    ) -> Batch:
        """Pack the segments; rows are in segment order."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        spans: list[Span] = []
        for given, start, blocks, num_logits, parents, left_out in segments:
            row, length = len(tokens), len(given)
            assert 0 <= num_logits <= length > 0
            tokens += given
            if parents is None or is_chain(parents):
                ancestors = None
                positions += range(start, start + length)
            else:
                ancestors = ancestors_of(parents)
                root = start + length - len(parents)
                positions += range(start, root)
                positions += [root + len(above) for above in ancestors]
            rows += range(row + length - num_logits, row + length)
            spans.append(Span(row, length, start - left_out, blocks, ancestors))
        return cls(tokens, positions, rows, spans, device, unseen)

    @property
    def trailing(self) -> bool:
        """Whether the rows that get logits are the last ones."""
        return bool(self.rows) and self.rows[0] == len(self.tokens) - len(self.rows)

    @cached_property
    def _flat(self) -> Tensor:
        """Tokens and positions, int64 `[2, rows]`. As in all preparation of a forward, the host
        does not wait for copies to the device."""
        flat = torch.tensor([self.tokens, self.positions]).to(self.device, non_blocking=True)
        if self.unseen is not None:
            rows = torch.tensor(self.unseen.rows).to(self.device, non_blocking=True)
            flat[0].index_copy_(0, rows, self.unseen.ids)
        return flat

    @property
    def input_ids(self) -> Tensor:
        """Int64 `[1, rows]`."""
        return self._flat[:1]

    @property
    def position_ids(self) -> Tensor:
        """Int64 `[1, rows]`."""
        return self._flat[1:]

    @cached_property
    def keep(self) -> int | Tensor:
        """`rows` as the argument `logits_to_keep` of transformers: the number of trailing rows (a
        slice, no gather), or int64 row numbers."""
        if self.trailing:
            return len(self.rows)
        rows = torch.tensor(self.rows, dtype=torch.int64)
        return rows.to(self.device, non_blocking=True)
