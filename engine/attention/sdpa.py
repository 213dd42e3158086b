"""SDPA: the reference backend, also for CPUs, with torch's `scaled_dot_product_attention` over the
paged KV cache.

For every span (one sequence's rows), chosen once per forward:

- if its slots are consecutive (the block pool prefers that), keys and values are *views* of the
  plane, and nothing is copied;
- otherwise its keys are gathered slot by slot.

FP8 planes are converted, which is a copy.

Each span is a separate call, so batches on a GPU, where launches are costly, need another backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.interface import FP8, KVPlane, PagedAttention, Span, Variation
from engine.attention.spans import bias_of, first_slot, lowest, slots_of, written_slots

# Rows up to which grouped heads are folded. Times on one thread with 16 heads on 4 KV heads and 260
# keys: for one row torch's own grouping takes 57 us in float32 and 415 us in bfloat16, folded heads
# 30 and 42; for 8 rows 163 and 219, folded 143 and 158.
FOLDED_ROWS = 16


class SdpaBackend:
    """Prepares forwards on one device."""

    name = "sdpa"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> SdpaForward:
        return SdpaForward(self, plane, spans)


class SdpaForward(PagedAttention):
    """One forward: the slots of its keys, and its calls for each sliding window."""

    def __init__(self, backend: SdpaBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        super().__init__(plane, written_slots(spans, plane.block_size).to(backend.device))
        self._spans = spans
        self._device = backend.device
        self._calls: dict[int | None, list[_Call]] = {}

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        stack, index = self._plane.where[layer]
        kind, dtype = self._plane.stacks[stack][0].dtype, query.dtype
        self._write(layer, key, value)
        if kind == FP8:
            kind = dtype
        calls = self._calls.get(how.window)
        if calls is None:
            calls = self._calls[how.window] = [
                _Call(self._plane, span, how.window, kind, self._device) for span in self._spans
            ]
        query = query.to(kind)
        parts = [call.run(stack, index, query, how) for call in calls]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return output.to(dtype)


class _Call:
    """One span: a view of its keys if their slots are consecutive, else a copy."""

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
        keys, values = (
            plane[index : index + 1, :, self._slots].to(query.dtype)
            for plane in self._stacks[stack]
        )
        return attention(query.narrow(2, self._row, self._length), keys, values, *self._bias, how)


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, how: Variation
) -> Tensor:
    """Return softmax(scaling q k' + bias) v `[batch, rows, heads, value_dim]` of dense queries
    `[batch, heads, rows, dim]` on keys and values `[batch, kv_heads, keys, dim]`."""
    if how.softcap is not None or how.sinks is not None:
        return _explicit(query, key, value, bias, causal, how).transpose(1, 2)
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    folds = heads != kv_heads and rows <= FOLDED_ROWS and not causal
    if folds:  # heads of one KV head become rows of one head
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
    """`attention` with soft cap and sinks (see Variation), in plain torch operations."""
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
