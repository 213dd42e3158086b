"""SDPA: the reference backend and the one for CPUs. `torch.scaled_dot_product_attention` over the
paged KV.

What is chosen once per forward, for every span (one sequence's rows):

- its slots are consecutive (the block pool prefers that): keys and values are *views* of the plane,
  nothing is copied;
- otherwise its keys are gathered slot by slot;
- all short spans on CUDA share one padded gather and one call, since a GPU pays for the launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.interface import KVPlane, PagedAttention, Span, Variation
from engine.attention.spans import (
    bias_of,
    first_slot,
    lowest,
    slots_of,
    visible,
    written_slots,
)

PADDED_ROWS = 17  # longest span to be padded with others: one token and sixteen proposed
# Up to so many rows. One thread, 16 heads on 4 of keys, 260 keys, us: torch's own grouping takes 57
# for a row in float32 and 415 in bfloat16, folded 30 and 42; at 8 rows 163 and 219, 143 and 158.
FOLDED_ROWS = 16


class SdpaBackend:
    """Prepares forwards on one device."""

    name = "sdpa"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pads = device.type != "cpu"

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> SdpaForward:
        return SdpaForward(self, plane, spans)


class SdpaForward(PagedAttention):
    """One forward: where its keys go, and the calls that read them, per sliding window."""

    def __init__(self, backend: SdpaBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        super().__init__(plane, written_slots(spans, plane.block_size).to(backend.device))
        self._spans = spans
        self._device, self._pads = backend.device, backend.pads
        self._calls: dict[int | None, list[_Call]] = {}

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        stack, index = self._plane.where[layer]
        kind, asked = self._plane.stacks[stack][0].dtype, query.dtype
        self._write(layer, key.to(kind), value.to(kind))
        calls = self._calls.get(how.window)
        if calls is None:
            calls = self._calls[how.window] = self._plan(how.window, kind)
        query = query.to(kind)
        parts = [call.run(stack, index, query, how) for call in calls]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return output.to(asked)

    def _plan(self, window: int | None, dtype: torch.dtype) -> list[_Call]:
        """Short neighbours are padded together where that pays."""
        plane, device = self._plane, self._device
        calls: list[_Call] = []
        for is_short, members in groupby(self._spans, key=lambda span: span.length <= PADDED_ROWS):
            spans = list(members)
            if is_short and self._pads and len(spans) > 1:
                calls.append(_Padded(plane, spans, window, dtype, device))
            else:
                calls += [_Alone(plane, span, window, dtype, device) for span in spans]
        return calls


class _Alone:
    """One span: a view of its keys where their slots are consecutive, else a copy."""

    def __init__(
        self,
        plane: KVPlane,
        span: Span,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        low, base = lowest(span, window), first_slot(span, plane.block_size)
        self._row, self._length = span.row, span.length
        self._stacks = plane.stacks
        self._bias = bias_of(span, low, window, dtype, device)
        self._slots: slice | Tensor
        if base is None:
            self._slots = torch.from_numpy(slots_of(span, plane.block_size, low)).to(device)
        else:
            self._slots = slice(base + low, base + span.end)

    def run(self, stack: int, index: int, query: Tensor, how: Variation) -> Tensor:
        keys, values = (plane[index : index + 1, :, self._slots] for plane in self._stacks[stack])
        return attention(query.narrow(2, self._row, self._length), keys, values, *self._bias, how)


class _Padded:
    """Several spans in one call, padded to the longest. Padding repeats the sequence's own first
    slot: a masked key still meets a zero weight, and zero times a foreign NaN would be NaN."""

    def __init__(
        self,
        plane: KVPlane,
        spans: Sequence[Span],
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows, keys = max(s.length for s in spans), max(s.end for s in spans)
        self._stacks = plane.stacks
        self._shape = (len(spans), rows, keys)
        self._first = spans[0].row
        self._count = sum(s.length for s in spans)
        slots = np.empty((len(spans), keys), dtype=np.int64)
        seen = np.zeros((len(spans), 1, rows, keys), dtype=bool)
        query_rows = np.empty((len(spans), rows), dtype=np.int64)
        kept = np.zeros((len(spans), rows), dtype=bool)
        for i, span in enumerate(spans):
            slots[i, : span.end] = slots_of(span, plane.block_size, 0)
            slots[i, span.end :] = slots[i, 0]
            seen[i, 0, : span.length, : span.end] = visible(span, window)
            seen[i, 0, span.length :] = seen[i, 0, span.length - 1]
            local = span.row - self._first
            query_rows[i] = np.minimum(np.arange(rows), span.length - 1) + local
            kept[i, : span.length] = True
        self._slots, self._query_rows, self._kept, hidden = (
            torch.from_numpy(array).to(device)
            for array in (slots.reshape(-1), query_rows.reshape(-1), np.flatnonzero(kept), ~seen)
        )
        self._bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
        self._bias.masked_fill_(hidden, -math.inf)

    def run(self, stack: int, index: int, query: Tensor, how: Variation) -> Tensor:
        count, rows, keys = self._shape
        flat = query[0].transpose(0, 1).narrow(0, self._first, self._count)
        flat = flat.index_select(0, self._query_rows)
        query = flat.reshape(count, rows, *flat.shape[1:]).transpose(1, 2)
        key, value = (
            plane[index]
            .index_select(1, self._slots)
            .view(-1, count, keys, plane.shape[-1])
            .transpose(0, 1)
            for plane in self._stacks[stack]
        )
        output = attention(query, key, value, self._bias, False, how).flatten(0, 1)
        return output.index_select(0, self._kept)[None]


_Call = _Alone | _Padded


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, how: Variation
) -> Tensor:
    """softmax(scaling q k' + bias) v of dense `[batch, heads, rows, dim]` on `[batch, kv_heads,
    keys, dim]`; answers rows first: `[batch, rows, heads, value_dim]`."""
    if how.softcap is not None or how.sinks is not None:
        return _explicit(query, key, value, bias, causal, how).transpose(1, 2)
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    folds = heads != kv_heads and rows <= FOLDED_ROWS and not causal
    if folds:  # heads that share keys and values are rows of one head
        groups = heads // kv_heads
        if bias is not None:
            bias = bias.repeat(*[1] * (bias.dim() - 2), groups, 1)
        query = query.reshape(batch, kv_heads, groups * rows, dim)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=causal,
        scale=how.scaling,
        enable_gqa=query.shape[1] != kv_heads,
    )
    return output.reshape(batch, heads, rows, -1).transpose(1, 2)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, how: Variation
) -> Tensor:
    """With a soft cap and sinks, see Variation."""
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scaling = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if causal:
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, -math.inf)
    elif bias is not None:
        scores = scores + bias
    if how.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    sink = how.sinks.float().reshape(1, -1, 1, 1).expand(batch, heads, rows, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
