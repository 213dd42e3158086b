"""SDPA: the reference backend and the one for CPUs. `torch.scaled_dot_product_attention` over the
paged KV.

What is chosen once per forward, for every span (one sequence's rows):

- its slots are consecutive (the block pool prefers that): keys and values are *views* of the plane,
  nothing is copied;
- otherwise its keys are gathered slot by slot;
- many short spans of equal length, and all short spans on CUDA, share one padded gather and one
  call. Padding repeats the sequence's own first slot: a masked key still meets a zero weight, and
  zero times a foreign NaN would be NaN.

On a CPU a call per sequence on views beats the padded gather from about 48 keys on (64 sequences
of 128 keys: 2.7 ms against 7.1 ms a layer), which is where `PADDED_KEYS_CPU` comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.interface import KVPlane, Span

PADDED_KEYS_CPU = 48  # longest context for which spans are padded together on a CPU
PADDED_ROWS = 17  # longest span to be padded with others: one token and sixteen proposed


def slots_of(blocks: Sequence[int], block_size: int, start: int, end: int) -> np.ndarray:
    """Slots of KV indices `start .. end` of a block table, int64."""
    first = start // block_size
    table = np.asarray(blocks[first : -(-end // block_size)], dtype=np.int64)
    slots = (table[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : end - first * block_size]


def first_slot(blocks: Sequence[int], count: int, block_size: int) -> int | None:
    """The first slot if the first `count` blocks are consecutive and ascending, else None."""
    base = blocks[0]
    if count == 1 or list(blocks[:count]) == list(range(base, base + count)):
        return base * block_size
    return None


def positions_of(span: Span) -> tuple[np.ndarray, np.ndarray]:
    """Positions of a span's rows `[length]` and of its keys `[end]`. A node stands at its depth,
    its KV at its index."""
    keys = np.arange(span.end)
    if span.ancestors:
        tail = len(span.ancestors)
        base = span.end - tail
        keys[base:] = [base + len(above) for above in span.ancestors]
    return keys[span.start :], keys


def visible(span: Span, window: int | None) -> np.ndarray:
    """Which keys a span's rows may see: bool `[length, end]`."""
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


class SdpaBackend:
    """Prepares forwards on one device."""

    name = "sdpa"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Below: spans that share one padded call. A CPU pays for the copy, a GPU for the launch.
        self.padded_keys = PADDED_KEYS_CPU if device.type == "cpu" else 1 << 62

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> SdpaForward:
        return SdpaForward(self, plane, spans)


class SdpaForward:
    """One forward: where its keys go, and the calls that read them, per sliding window."""

    def __init__(self, backend: SdpaBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        self._backend = backend
        self._plane = plane
        self._spans = spans
        self._where = plane.where
        self._calls: dict[int | None, list[_Call]] = {}
        self._written, self._slots = self._destination()

    def _destination(self) -> tuple[list[_Views] | None, Tensor | None]:
        """Views of the slots to write when they are consecutive, else their numbers."""
        spans, size = self._spans, self._plane.block_size
        if len(spans) == 1:
            span = spans[0]
            base = first_slot(span.blocks, -(-span.end // size), size)
            if base is not None:
                return views(self._plane, base + span.start, base + span.end), None
        if all(span.length == 1 for span in spans):
            flat = [s.blocks[s.start // size] * size + s.start % size for s in spans]
            return None, torch.tensor(flat, device=self._backend.device)
        parts = [slots_of(span.blocks, size, span.start, span.end) for span in spans]
        return None, torch.from_numpy(np.concatenate(parts)).to(self._backend.device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        stack, index = self._where[layer]
        if self._written is not None:
            keys, values = self._written[stack]
            keys[index].copy_(key)
            values[index].copy_(value)
        else:
            all_keys, all_values = self._plane.stacks[stack]
            all_keys[index].index_copy_(1, self._slots, key[0])  # type: ignore[arg-type]
            all_values[index].index_copy_(1, self._slots, value[0])  # type: ignore[arg-type]
        calls = self._calls.get(window)
        if calls is None:
            calls = self._calls[window] = self._plan(window, query.dtype)
        kernel = _Kernel(scaling, softcap, sinks)
        if len(calls) == 1:
            return calls[0].run(stack, index, query, kernel)
        parts = [call.run(stack, index, query, kernel) for call in calls]
        return torch.cat(parts, dim=1)

    def _plan(self, window: int | None, dtype: torch.dtype) -> list[_Call]:
        """Neighbouring short spans share a padded call, every other span has its own."""
        calls: list[_Call] = []
        group: list[Span] = []
        for span in self._spans:
            if span.length <= PADDED_ROWS and span.end <= self._backend.padded_keys:
                group.append(span)
                continue
            calls += self._grouped(group, window, dtype)
            group = []
            calls.append(self._single(span, window, dtype))
        return calls + self._grouped(group, window, dtype)

    def _grouped(self, group: list[Span], window: int | None, dtype: torch.dtype) -> list[_Call]:
        if len(group) > 1:
            return [_Padded(self._plane, group, window, dtype, self._backend.device)]
        return [self._single(span, window, dtype) for span in group]

    def _single(self, span: Span, window: int | None, dtype: torch.dtype) -> _Call:
        size = self._plane.block_size
        low = 0 if window is None else max(0, int(positions_of(span)[0].min()) - window + 1)
        bias, causal = _bias(span, low, window, dtype, self._backend.device)
        base = first_slot(span.blocks, -(-span.end // size), size)
        if base is not None:
            return _Viewed(span, views(self._plane, base + low, base + span.end), bias, causal)
        slots = torch.from_numpy(slots_of(span.blocks, size, low, span.end))
        return _Gathered(span, self._plane, slots.to(self._backend.device), bias, causal)


_Views = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def views(plane: KVPlane, low: int, high: int) -> list[_Views]:
    """Slots `low .. high` of every layer: per stack, keys and values `[1, kv_heads, slots, dim]`
    by layer. One slice for all layers, since each costs as much as a small product."""
    return [
        (
            keys[:, None, :, low:high].unbind(0),
            values[:, None, :, low:high].unbind(0),
        )
        for keys, values in plane.stacks
    ]


def _bias(
    span: Span, low: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Additive mask `[length, end-low]` or none, and whether plain `is_causal` says it all."""
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


class _Kernel:
    """The arithmetic of one layer: softmax(scaling q k' + bias) v, with its variations."""

    __slots__ = ("plain", "scaling", "sinks", "softcap")

    def __init__(self, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> None:
        self.scaling = scaling
        self.softcap = softcap
        self.sinks = sinks
        self.plain = softcap is None and sinks is None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """`[batch, heads, rows, dim]` on `[batch, kv_heads, keys, dim]`; answers rows first:
        `[batch, rows, heads, value_dim]`."""
        if not self.plain:
            return self._explicit(query, key, value, bias, causal).transpose(1, 2)
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)

    def _explicit(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """Soft-capped scores (Gemma 2, arXiv:2408.00118) and learned sinks (gpt-oss: one more
        column per head, which takes weight and adds nothing)."""
        batch, heads, rows, _ = query.shape
        groups = heads // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = (query @ key.transpose(2, 3)).float() * scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
            scores = scores.masked_fill(hidden, -math.inf)
        elif bias is not None:
            scores = scores + bias
        if self.sinks is None:
            return scores.softmax(-1).to(value.dtype) @ value
        sink = self.sinks.float().reshape(1, -1, 1, 1).expand(batch, heads, rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        return weights.to(value.dtype) @ value


class _Viewed:
    """One span whose slots are consecutive."""

    def __init__(self, span: Span, views: list[_Views], bias: Tensor | None, causal: bool) -> None:
        self._row, self._length = span.row, span.length
        self._views = views
        self._bias, self._causal = bias, causal

    def run(self, stack: int, index: int, query: Tensor, kernel: _Kernel) -> Tensor:
        keys, values = self._views[stack]
        if query.shape[2] != self._length:
            query = query.narrow(2, self._row, self._length)
        return kernel(query, keys[index], values[index], self._bias, self._causal)


class _Gathered:
    """One span whose slots are scattered."""

    def __init__(
        self, span: Span, plane: KVPlane, slots: Tensor, bias: Tensor | None, causal: bool
    ) -> None:
        self._row, self._length = span.row, span.length
        self._stacks, self._slots = plane.stacks, slots
        self._bias, self._causal = bias, causal

    def run(self, stack: int, index: int, query: Tensor, kernel: _Kernel) -> Tensor:
        keys, values = (
            plane[index].index_select(1, self._slots)[None] for plane in self._stacks[stack]
        )
        query = query.narrow(2, self._row, self._length)
        return kernel(query, keys, values, self._bias, self._causal)


class _Padded:
    """Several spans in one call, padded to the longest."""

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
            slots[i, : span.end] = slots_of(span.blocks, plane.block_size, 0, span.end)
            slots[i, span.end :] = slots[i, 0]
            seen[i, 0, : span.length, : span.end] = visible(span, window)
            seen[i, 0, span.length :] = seen[i, 0, span.length - 1]
            local = span.row - self._first
            query_rows[i] = np.minimum(np.arange(rows), span.length - 1) + local
            kept[i, : span.length] = True
        self._slots = torch.from_numpy(slots.reshape(-1)).to(device)
        hidden = torch.from_numpy(~seen).to(device)
        self._bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
        self._bias.masked_fill_(hidden, -math.inf)
        self._ragged: tuple[Tensor, Tensor] | None = None
        if self._count != len(spans) * rows:
            self._ragged = (
                torch.from_numpy(query_rows.reshape(-1)).to(device),
                torch.from_numpy(np.flatnonzero(kept)).to(device),
            )

    def run(self, stack: int, index: int, query: Tensor, kernel: _Kernel) -> Tensor:
        count, rows, keys = self._shape
        flat = query[0].transpose(0, 1).narrow(0, self._first, self._count)
        if self._ragged is not None:
            flat = flat.index_select(0, self._ragged[0])
        query = flat.reshape(count, rows, *flat.shape[1:]).transpose(1, 2)
        key, value = (
            plane[index]
            .index_select(1, self._slots)
            .view(-1, count, keys, plane.shape[-1])
            .transpose(0, 1)
            for plane in self._stacks[stack]
        )
        output = kernel(query, key, value, self._bias, False).flatten(0, 1)
        if self._ragged is not None:
            output = output.index_select(0, self._ragged[1])
        return output[None]


_Call = _Viewed | _Gathered | _Padded
