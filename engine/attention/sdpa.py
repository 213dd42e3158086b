"""SDPA: the reference backend and the one for CPUs. `torch.scaled_dot_product_attention` over the
paged KV.

What is chosen once per forward, for every span (one sequence's rows):

- its slots are consecutive (the block pool prefers that): keys and values are *views* of the plane,
  nothing is copied;
- otherwise its keys are gathered slot by slot;
- many short spans of equal length, and all short spans on CUDA, share one padded gather and one
  call. Padding repeats the sequence's own first slot: a masked key still meets a zero weight, and
  zero times a foreign NaN would be NaN.

On a CPU a call per sequence on views beats the padded gather from about 64 keys on: a 16-layer
forward of 64 decodes takes 49 ms on views and 40 padded with 32 keys each, 69 and 169 with 128.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import KVPlane, Span
from engine.attention.kernel import Kernel
from engine.attention.spans import Bias, bias_of, first_slot, lowest, slots_of, visible

PADDED_KEYS_CPU = 64  # longest context for which spans are padded together on a CPU
PADDED_ROWS = 17  # longest span to be padded with others: one token and sixteen proposed


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
        self._plane = plane
        self._spans = spans
        self._device = backend.device
        self._padded_keys = backend.padded_keys
        self._where = plane.where
        self._bases = [first_slot(span, plane.block_size) for span in spans]
        self._calls: dict[int | None, list[_Call]] = {}
        self._written, self._slots = self._destination()

    def _destination(self) -> tuple[list[_Views] | None, Tensor | None]:
        """Views of the slots to write when they are consecutive, else their numbers."""
        spans, size = self._spans, self._plane.block_size
        base = self._bases[0]
        if len(spans) == 1 and base is not None:
            return views(self._plane, base + spans[0].start, base + spans[0].end), None
        if all(span.length == 1 for span in spans):
            flat = [s.blocks[s.start // size] * size + s.start % size for s in spans]
            return None, torch.tensor(flat, device=self._device)
        parts = [slots_of(span, size, span.start) for span in spans]
        return None, torch.from_numpy(np.concatenate(parts)).to(self._device)

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
        kind, asked = self._plane.stacks[stack][0].dtype, query.dtype
        if asked != kind:
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
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
        kernel = Kernel(scaling, softcap, sinks)
        parts = [call.run(stack, index, query, kernel) for call in calls]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return output if asked == kind else output.to(asked)

    def _plan(self, window: int | None, dtype: torch.dtype) -> list[_Call]:
        """Neighbours of one kind are planned together. A span alone is never padded."""
        calls: list[_Call] = []
        for kind, members in groupby(range(len(self._spans)), key=self._kind):
            chosen = list(members)
            if kind == "padded" and len(chosen) == 1:
                kind = "gathered" if self._bases[chosen[0]] is None else "viewed"
            spans = [self._spans[i] for i in chosen]
            if kind == "padded":
                calls.append(_Padded(self._plane, spans, window, dtype, self._device))
                continue
            lows = [lowest(span, window) for span in spans]
            biases = [
                bias_of(span, low, window, dtype, self._device)
                for span, low in zip(spans, lows, strict=True)
            ]
            if kind == "viewed":
                bases = [self._bases[i] or 0 for i in chosen]
                calls.append(_Viewed(self._plane, spans, bases, lows, biases))
            else:
                for span, low, bias in zip(spans, lows, biases, strict=True):
                    calls.append(_Gathered(self._plane, span, low, bias, self._device))
        return calls

    def _kind(self, index: int) -> _Kind:
        span = self._spans[index]
        if span.length <= PADDED_ROWS and span.end <= self._padded_keys:
            return "padded"
        return "gathered" if self._bases[index] is None else "viewed"


_Views = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
_Kind = Literal["viewed", "gathered", "padded"]


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


class _Viewed:
    """Neighbouring spans whose slots are consecutive: one call each, no copy. What a layer needs is
    laid out by layer beforehand, since this loop runs sequences x layers times in a forward."""

    def __init__(
        self,
        plane: KVPlane,
        spans: Sequence[Span],
        bases: Sequence[int],
        lows: Sequence[int],
        biases: Sequence[Bias],
    ) -> None:
        self._first = spans[0].row
        self._lengths = [span.length for span in spans]
        self._count = sum(self._lengths)
        self._biases = biases
        seen = [
            views(plane, base + low, base + span.end)
            for span, base, low in zip(spans, bases, lows, strict=True)
        ]
        self._by_layer = [
            [list(zip(*(pair[side] for pair in stack), strict=True)) for side in (0, 1)]
            for stack in zip(*seen, strict=True)
        ]

    def run(self, stack: int, index: int, query: Tensor, kernel: Kernel) -> Tensor:
        keys, values = self._by_layer[stack]
        if query.shape[2] != self._count:
            query = query.narrow(2, self._first, self._count)
        if len(self._lengths) == 1:
            return kernel(query, keys[index][0], values[index][0], *self._biases[0])
        rows = torch.split(query, self._lengths, dim=2)
        parts = zip(rows, keys[index], values[index], self._biases, strict=True)
        return torch.cat([kernel(q, k, v, bias, causal) for q, k, v, (bias, causal) in parts], 1)


class _Gathered:
    """One span whose slots are scattered."""

    def __init__(
        self, plane: KVPlane, span: Span, low: int, bias: Bias, device: torch.device
    ) -> None:
        self._row, self._length = span.row, span.length
        self._stacks, self._bias = plane.stacks, bias
        self._slots = torch.from_numpy(slots_of(span, plane.block_size, low)).to(device)

    def run(self, stack: int, index: int, query: Tensor, kernel: Kernel) -> Tensor:
        keys, values = (
            plane[index].index_select(1, self._slots)[None] for plane in self._stacks[stack]
        )
        query = query.narrow(2, self._row, self._length)
        return kernel(query, keys, values, *self._bias)


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
            slots[i, : span.end] = slots_of(span, plane.block_size, 0)
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

    def run(self, stack: int, index: int, query: Tensor, kernel: Kernel) -> Tensor:
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
