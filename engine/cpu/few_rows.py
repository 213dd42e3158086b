"""The fused decoder for a decode or a verification: torch's products, compiled pieces between them.

At 16 layers of width 192 a forward of one row spent a third of its time in operations on a few
hundred numbers. The buffers of a row count are made once and written over by every forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import PreparedAttention
from engine.cpu.kernels_rows import add, add_and_normalise, gate, normalise, rotate

Floats = npt.NDArray[np.float32]


class Layer(Protocol):
    """Weights `[out, in]`, norms `[width]`."""

    @property
    def index(self) -> int: ...
    @property
    def scaling(self) -> float: ...
    @property
    def norm(self) -> Tensor: ...
    @property
    def query_key_value(self) -> Tensor: ...
    @property
    def output(self) -> Tensor: ...
    @property
    def mlp_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> Tensor: ...
    @property
    def down(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Shape:
    width: int
    heads: int
    kv_heads: int
    epsilon: float


class _Buffers:
    """For one row count. Each is a tensor and an array over the same memory: torch multiplies,
    compiled code does the rest. `*_rows` go into a product from the right, turned; the others are
    what products leave."""

    def __init__(self, rows: int, shape: Shape, layer: Layer) -> None:
        columns = max(rows, 2)
        dim = layer.query_key_value.shape[0] // (shape.heads + 2 * shape.kv_heads)
        inner = layer.down.shape[1]
        self.normed_rows, self.normed = _shared(columns, shape.width)
        self.packed, self.packed_array = _shared(layer.query_key_value.shape[0], columns)
        self.added, self.added_array = _shared(shape.width, columns)
        self.wide, self.wide_array = _shared(layer.gate_up.shape[0], columns)
        self.inner_rows, self.inner = _shared(columns, inner)
        self.space = np.zeros(inner * columns, dtype=np.float32)
        self.attended_rows, _ = _shared(columns, shape.heads * dim)
        self.attended = self.attended_rows.view(columns, shape.heads, dim)
        self.query, self.query_array = _shared(shape.heads, rows, dim)
        self.key, self.key_array = _shared(shape.kv_heads, rows, dim)
        self.value, self.value_array = _shared(shape.kv_heads, rows, dim)


def _shared(*size: int) -> tuple[Tensor, Floats]:
    array = np.zeros(size, dtype=np.float32)
    return torch.from_numpy(array), array


class FewRows:
    """Answers the hidden rows after the last layer, before the last norm."""

    def __init__(
        self, layers: Sequence[Layer], shape: Shape, angles: tuple[Tensor, Tensor]
    ) -> None:
        self._layers = layers
        self._shape = shape
        self._epsilon = np.float32(shape.epsilon)
        self._norms = [(layer.norm.numpy(), layer.mlp_norm.numpy()) for layer in layers]
        self._cosine, self._sine = (table.contiguous().numpy() for table in angles)
        self._buffers: dict[int, _Buffers] = {}

    def run(self, hidden: Tensor, positions: Tensor, prepared: PreparedAttention) -> Tensor:
        """`hidden` `[rows, width]` is written over."""
        rows = len(hidden)
        buffers = self._buffers.get(rows)
        if buffers is None:
            buffers = self._buffers[rows] = _Buffers(rows, self._shape, self._layers[0])
        here, at = hidden.numpy(), positions.numpy()
        epsilon, right = self._epsilon, buffers.normed_rows.t()
        inner_right, attended_right = buffers.inner_rows.t(), buffers.attended_rows.t()
        query, key, value = buffers.query[None], buffers.key[None], buffers.value[None]
        for layer, (norm, mlp_norm) in zip(self._layers, self._norms, strict=True):
            if layer is self._layers[0]:
                normalise(here, norm, epsilon, buffers.normed)
            else:
                add_and_normalise(buffers.added_array, here, norm, epsilon, buffers.normed)
            torch.mm(layer.query_key_value, right, out=buffers.packed)
            rotate(
                buffers.packed_array, self._cosine, self._sine, at,
                buffers.query_array, buffers.key_array, buffers.value_array,
            )  # fmt: skip
            attended = prepared.attend(
                layer.index, query, key, value,
                scaling=layer.scaling, window=None, softcap=None, sinks=None,
            )  # fmt: skip
            buffers.attended.copy_(attended[0])  # one row fills both columns
            torch.mm(layer.output, attended_right, out=buffers.added)
            add_and_normalise(buffers.added_array, here, mlp_norm, epsilon, buffers.normed)
            torch.mm(layer.gate_up, right, out=buffers.wide)
            gate(buffers.wide_array, buffers.space, buffers.inner)
            torch.mm(layer.down, inner_right, out=buffers.added)
        add(buffers.added_array, here)
        return hidden
