"""Attention on a CPU that reads keys and values in place: one compiled call for all sequences of a
step. Layers with a sliding window, a soft cap or sinks use SDPA instead.

SDPA on a CPU needs a call per sequence or a copy of all contexts; one call of
`engine.cpu.kernels_attention` serves many sequences and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import KVPlane, LayerShape, PreparedAttention, Span, Variation
from engine.attention.sdpa import SdpaBackend, SdpaForward
from engine.cpu.kernels_attention import SPAN_ROWS, attend, buffers_for, places_of
from engine.cpu.vectors import LANES

MOST_THREADS = 2  # with more, torch's parallel attention is faster than ours on one thread

Words = npt.NDArray[Any]


def suits(device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]) -> bool:
    """Whether a model gains from this backend. The decision depends only on facts known at start,
    so that a restart gives bit-identical logits."""
    few = device.type == "cpu" and torch.get_num_threads() <= MOST_THREADS
    return few and any(
        layer.window is None and fits(dtype, layer.key_dim, layer.value_dim) for layer in layers
    )


def fits(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether compiled code supports this dtype and these head dimensions."""
    step = {torch.float32: LANES, torch.bfloat16: 2 * LANES}.get(dtype)
    return step is not None and key_dim == value_dim and key_dim % step == 0


class CompiledBackend:
    """The attention backend of compiled code on a CPU."""

    name = "compiled"

    def __init__(self) -> None:
        self.others = SdpaBackend(torch.device("cpu"))

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> CompiledForward:
        return CompiledForward(self, plane, spans)


class CompiledForward(PreparedAttention):
    """One forward. Long spans are split, which is faster than SDPA and changes no bit of a row."""

    def __init__(self, backend: CompiledBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        self._others, self._plane, self._spans = backend.others, plane, spans
        self._whole: SdpaForward | None = None
        pieces = [piece for span in spans for piece in _pieces(span)]
        self._is_cut = all(piece.length <= SPAN_ROWS for piece in pieces)
        if self._is_cut:
            self._span_table, self._seen, self._tables = _described(pieces, plane.block_size)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        stack, index = self._plane.where[layer]
        is_plain = how.window is None and how.softcap is None and how.sinks is None
        known = fits(key.dtype, key.shape[-1], value.shape[-1])
        if not (self._is_cut and is_plain and known):
            if self._whole is None:
                self._whole = SdpaForward(self._others, self._plane, self._spans)
            return self._whole.run(layer, query, key, value, how)
        _, heads, rows, dim = query.shape
        packed = torch.cat([query, key, value], dim=1)[0].float().transpose(0, 1).reshape(rows, -1)
        array = np.empty((rows, heads * dim), dtype=np.float32)
        keys, values = (words_of_plane(part[index]) for part in self._plane.stacks[stack])
        parts, size = parts_of(keys), self._plane.block_size
        attend(
            parts, packed.numpy(), heads, self._span_table, self._seen,
            places_of(self._span_table, self._tables, size, keys.shape[-1]),
            np.float32(dim**-0.5 if how.scaling is None else how.scaling), keys, values,
            buffers_for(self._span_table, heads // keys.shape[0], dim), array,
        )  # fmt: skip
        return torch.from_numpy(array).view(1, rows, heads, dim).to(query.dtype)


def parts_of(words: Words) -> tuple[int, ...]:
    """Return the `parts` argument of `attend` for the heads of a plane."""
    return (0,) * int(words.shape[-1] // LANES)


def words_of_plane(tensor: Tensor) -> Words:
    """Return keys or values `[..., dim]` as float32, or as words of two bfloat16."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int32).numpy().view(np.uint32)


def _pieces(span: Span) -> list[Span]:
    """Split a span into pieces of at most `SPAN_ROWS` rows. A tree stays whole, even if larger."""
    chain = span.length - len(span.ancestors or ())
    firsts = list(range(0, chain if span.ancestors else span.length, SPAN_ROWS))
    if span.ancestors and (not firsts or span.length - firsts[-1] > SPAN_ROWS):
        firsts.append(chain)
    return [
        span._replace(
            row=span.row + first,
            length=last - first,
            start=span.start + first,
            ancestors=span.ancestors if last == span.length else None,
        )
        for first, last in pairwise([*firsts, span.length])
    ]


def _described(
    spans: Sequence[Span], block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return `spans` and `seen` for `attend`, and `tables` for `places_of`."""
    span_table = np.array([(s.row, s.length, s.start) for s in spans], dtype=np.int64)
    seen = np.zeros(max(span.row + span.length for span in spans), dtype=np.uint64)
    counts = [-(-span.end // block_size) for span in spans]
    tables = np.zeros((len(spans), max(counts)), dtype=np.int64)
    for span, table, count in zip(spans, tables, counts, strict=True):
        table[:count] = span.blocks[:count]
        seen[span.row : span.row + span.length] = _masks(span)
    return span_table, seen, tables


def _masks(span: Span) -> list[int]:
    """Return a mask per row. Bit i: whether the row sees the key of the span's i-th row."""
    if not span.ancestors:
        return [(2 << row) - 1 for row in range(span.length)]
    before = span.length - len(span.ancestors)
    masks = [(2 << row) - 1 for row in range(before)]
    for node, above in enumerate(span.ancestors):
        masks.append((1 << before) - 1 | sum(1 << before + i for i in (*above, node)))
    return masks
