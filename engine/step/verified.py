"""The outcomes of a step, with rows of hidden states, for proposers that learn from them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.attention.packed_copy import copied_to_device
from engine.scheduling.segment import Segment
from engine.scheduling.step_plan import StepPlan
from engine.speculation.proposal import EMPTY, Verified
from engine.step.acceptance import Sampled


def verified_of(
    plan: StepPlan,
    sampled: list[Sampled],
    hidden: Tensor | None,
    packed: list[Segment],
    *,
    every: bool,
) -> list[Verified]:
    """Return outcomes. `hidden`: of the target, for `every` row of `packed` or rows with logits."""
    items, row, kept_items, rows = iter(sampled), 0, list[Sampled](), list[list[int]]()
    for chunk, segment in zip(plan.chunks, packed, strict=True):
        item = next(items) if chunk.samples else Sampled(chunk, EMPTY, 0)
        last = row + chunk.length - 1  # of the committed tokens
        nodes = item.rows[1:] if item.tokens else []
        if every and (item.tokens or not chunk.samples):
            kept_items.append(item)
            rows.append([*range(row, last + 1), *(last + node for node in nodes)])
        elif item.tokens:
            kept_items.append(item)
            rows.append([item.row + item.rows[-1]])
        row += len(segment.tokens)
    return [_verified(*each) for each in zip(kept_items, rows, _parts(hidden, rows), strict=True)]


def _parts(hidden: Tensor | None, rows: list[list[int]]) -> Seq[Tensor | None]:
    """Split `hidden` by item, with one device copy."""
    if hidden is None or not rows:
        return [None] * len(rows)
    indices = copied_to_device(np.concatenate(rows), hidden.device)
    return torch.split(hidden.index_select(0, indices), [len(each) for each in rows])


def _verified(item: Sampled, rows: list[int], hidden: Tensor | None) -> Verified:
    chunk, tokens = item.chunk, item.tokens
    first = chunk.end + max(len(tokens) - 1, 0) - len(rows)
    return Verified(chunk.seq, item.proposal, item.drawn, item.path, tokens, first, hidden)
