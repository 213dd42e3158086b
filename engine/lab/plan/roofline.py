"""The time of one forward pass from a roofline (Williams et al., CACM 2009), part by part.

Each part takes the longer of moving its bytes and doing its arithmetic; the parts follow one
another, so their times add up. Left out: activations, writing the new keys and values, sampling,
communication between devices. What is left is the least time that the hardware allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.lab.plan.device import Device
from engine.lab.plan.numerics import PRECISIONS, Precision
from engine.lab.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read from memory, floating-point operations, and operations per second."""

    bytes: float
    flops: float
    rate: float

    def seconds(self, bandwidth: float) -> float:
        return max(self.bytes / bandwidth, self.flops / self.rate)


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass: its parts, and its time in seconds."""

    dense: Work
    experts: Work
    head: Work
    attention: Work
    seconds: float

    @property
    def bytes(self) -> float:
        return sum(w.bytes for w in (self.dense, self.experts, self.head, self.attention))

    @property
    def flops(self) -> float:
        return sum(w.flops for w in (self.dense, self.experts, self.head, self.attention))

    @property
    def weight_bytes(self) -> float:
        return self.dense.bytes + self.experts.bytes + self.head.bytes


@dataclass(frozen=True, slots=True)
class Served:
    """A model on a device: its weights in `precision`, its cache in `kv_bytes` a number, and
    `launch` seconds of overhead for every layer of a forward pass."""

    shape: ModelShape
    device: Device
    precision: Precision
    kv_bytes: float = 2.0
    launch: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """What the weights occupy in memory, the embedding table included."""
        tables = (1 if self.shape.tied else 2) * self.shape.embedding_weights
        inner = self.shape.parameters - tables
        return inner * self.precision.weight_bytes + tables * self.precision.table_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.shape.kv_values_per_token * self.kv_bytes

    def cache_bytes(self, context: int) -> float:
        """What the keys and values of one sequence occupy; full windows do not grow."""
        return self.shape.attended(context) * self.shape.attention.kv_values * self.kv_bytes

    def forward(self, *, batch: int, tokens: int, context: int) -> Forward:
        """One pass over `tokens` new tokens of each of `batch` sequences, all of which have
        `context` tokens in the cache. A sequence's cache is read once for all of its tokens."""
        shape, rows = self.shape, batch * tokens
        rate = self.device.flops(self.precision)
        wide = self.device.flops(PRECISIONS["bf16"])
        width = self.precision.weight_bytes
        dense = Work(shape.dense_weights * width, 2.0 * shape.dense_weights * rows, rate)
        table = shape.embedding_weights
        head = Work(table * self.precision.table_bytes, 2.0 * table * rows, wide)
        experts = self._experts(rows, rate)
        attention = Work(
            batch * self.cache_bytes(context),
            float(rows) * shape.attention.flops_per_position * shape.attended(context),
            wide,
        )
        parts = (dense, experts, head, attention)
        seconds = sum(part.seconds(self.device.bandwidth) for part in parts)
        return Forward(*parts, self.launch * shape.layers + seconds)

    def _experts(self, rows: int, rate: float) -> Work:
        experts = self.shape.experts
        if experts is None:
            return Work(0.0, 0.0, rate)
        read = experts.layers * experts.touched(rows) * experts.weights
        used = experts.layers * experts.per_token * experts.weights
        return Work(read * self.precision.weight_bytes, 2.0 * used * rows, rate)
