"""Where a span's keys are and which of them its rows see: slots, positions, masks.

Computed on the host for one `Span` at a time, once per forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Span

Bias = tuple[Tensor | None, bool]  # additive mask or None, and the value of `is_causal`


def slots_of(span: Span, block_size: int, low: int) -> np.ndarray:
    """Return the slots of a span's KV indices `low .. end`, int64."""
    first = low // block_size
    table = np.asarray(span.blocks[first : -(-span.end // block_size)], dtype=np.int64)
    slots = (table[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[low - first * block_size : span.end - first * block_size]


def written_slots(spans: Sequence[Span], size: int) -> Tensor:
    """Return the slots of the spans' own rows, int64 `[rows]`, with blocks of `size`."""
    return torch.tensor(
        [s.blocks[i // size] * size + i % size for s in spans for i in range(s.start, s.end)]
    )


def first_slot(span: Span, block_size: int) -> int | None:
    """Return the slot of KV index 0 if a span's blocks are consecutive, ascending; else None."""
    count = -(-span.end // block_size)
    base = span.blocks[0]
    if count == 1 or list(span.blocks[:count]) == list(range(base, base + count)):
        return base * block_size
    return None


def positions_of(span: Span) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of a span's rows `[length]` and of its keys `[end]`. A tree node's
    position follows from its depth, its KV index from its place in the span."""
    keys = np.arange(span.end)
    if span.ancestors:
        tail = len(span.ancestors)
        base = span.end - tail
        keys[base:] = [base + len(above) for above in span.ancestors]
    return keys[span.start :], keys


def visible(span: Span, window: int | None) -> np.ndarray:
    """Return which keys a span's rows see, bool `[length, end]`."""
    rows, keys = positions_of(span)
    seen = np.arange(span.start, span.end)[:, None] >= np.arange(span.end)[None, :]
    if span.ancestors:
        tail = len(span.ancestors)
        branch = np.zeros((tail, tail), dtype=bool)
        for node, above in enumerate(span.ancestors):
            branch[node, [*above, node]] = True
        seen[-tail:, -tail:] = branch
    if window is not None:
        seen &= rows[:, None] - keys[None, :] < window
    return seen


def lowest(span: Span, window: int | None) -> int:
    """Return the first KV index that any row of the span may see."""
    return 0 if window is None else max(0, int(positions_of(span)[0].min()) - window + 1)


def bias_of(
    span: Span, low: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Bias:
    """Return the mask of a span's rows over its keys from `low` on, `[length, end-low]`."""
    windowed = window is not None and span.end - low > window
    if not windowed and not span.ancestors:
        if span.length == 1:
            return None, False
        if span.start == low:
            return None, True
        bias = torch.zeros(span.length, span.end - low, dtype=dtype, device=device)
        bias[:, span.start - low :].fill_(float("-inf")).triu_(1)
        return bias, False
    seen = torch.from_numpy(visible(span, window)[:, low:]).to(device)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf), False
