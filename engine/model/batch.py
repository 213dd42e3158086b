"""Batch: the segments of one forward, packed into one flat row of tokens.

Owns positions, the order of rows, and which rows meet the LM head. A chain is causal; a tree's
nodes carry their ancestors, stand at their depth and keep their KV at their index. Knows nothing
of proposals: parents come in, masks are the attention backend's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.interface import Span
from engine.scheduling.segment import Segment, ancestors_of, is_chain


@dataclass(frozen=True, slots=True)
class Unseen:
    """Tokens that only the device knows, int64 `ids` `[len(rows)]`, for these rows of a forward;
    its segments hold zeros in their place."""

    rows: list[int]
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """`input_ids` and `positions` are int64 `[1, rows]`. `keep`: the `num_logits` rows that meet
    the LM head, as transformers takes them: a count of trailing rows, or int64 row numbers."""

    input_ids: Tensor
    positions: Tensor
    spans: list[Span]
    num_logits: int
    keep: int | Tensor

    @classmethod
    def pack(
        cls, segments: Sequence[Segment], device: torch.device, unseen: Unseen | None = None
    ) -> Batch:
        """One tensor each from plain lists; rows stand in segment order."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        spans: list[Span] = []
        for segment in segments:
            row, length, start = len(tokens), len(segment.tokens), segment.start
            assert length > 0
            assert 0 <= segment.num_logits <= length
            tokens += segment.tokens
            parents = segment.tail_parents
            if parents is None or is_chain(parents):
                ancestors = None
                positions += range(start, start + length)
            else:
                ancestors = ancestors_of(parents)
                root = start + length - len(parents)
                positions += range(start, root)
                positions += [root + len(above) for above in ancestors]
            rows += range(row + length - segment.num_logits, row + length)
            spans.append(Span(row, length, start, segment.blocks, ancestors))
        # The host does not wait for what it sends, here and in all that prepares a forward.
        flat = torch.tensor([tokens, positions]).to(device, non_blocking=True)
        if unseen is not None:
            there = torch.tensor(unseen.rows).to(device, non_blocking=True)
            flat[0].index_copy_(0, there, unseen.ids)
        return cls(flat[:1], flat[1:], spans, len(rows), _keep(rows, len(tokens), device))


def _keep(rows: list[int], count: int, device: torch.device) -> int | Tensor:
    """Trailing rows as their number (a slice, no gather); otherwise the row numbers."""
    if rows and rows[0] == count - len(rows):
        return len(rows)
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
