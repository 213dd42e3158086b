"""Predict the time of a forward pass and of a round with a roofline (Williams et al., CACM 2009).

Each part of a pass takes the longer of moving its bytes and doing its arithmetic; parts run one
after another, so their times add up. Left out: activations, writing new keys and values, sampling,
and communication between devices. The result is a lower bound on the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError
from engine.lab.plan.shape import ModelShape

# Bytes per weight inside the layers; 128 quantized weights share one 32-bit scale, and are
# multiplied in bf16. Embeddings and the output head stay in 16 bits.
PRECISIONS = {"bf16": 2.0, "fp8": 1.0 + 4 / 128, "int4": 0.5 + 4 / 128}
TABLE_BYTES = 2.0
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
CUSTOM = "cpu"  # any machine: the caller gives its figures, or `machine` measures this one


@dataclass(frozen=True, slots=True)
class Device:
    """`count` devices that share every matrix evenly. All figures are totals over the devices, from
    the makers' data sheets: bytes/s, and dense FLOPs per second (no structured sparsity) with
    32-bit accumulation. `memory` in bytes; None: unknown, so that fit is not reported."""

    name: str
    count: int
    bandwidth: float
    bf16_flops: float
    memory: float | None


# GB/s, TFLOP/s in bf16, GB.
DEVICES: dict[str, tuple[float, float, float]] = {
    "h100-sxm": (3350, 989.4, 80),
    "h200": (4800, 989.4, 141),
    "a100-80": (2039, 312, 80),
    "l4": (300, 121, 24),
    "l40s": (864, 362, 48),
    "rtx-4090": (1008, 165.2, 24),
    "rtx-3090": (936, 71, 24),
    "mi300x": (5300, 1307.4, 192),
}


def device_of(
    name: str, count: int = 1, *, bandwidth: float | None = None, tflops: float | None = None,
    memory: float | None = None,
) -> Device:  # fmt: skip
    """Return `count` tensor-parallel devices of a preset; the caller's figures (GB/s, TFLOP/s, GB
    of one device) override its own. Raises ConfigError if a figure is missing."""
    sheet = DEVICES.get(name, (bandwidth, tflops, memory))
    rate, bf16, room = bandwidth or sheet[0], tflops or sheet[1], memory or sheet[2]
    if rate is None or bf16 is None:
        raise ConfigError(
            f"say where with --device ({', '.join(DEVICES)}), or give any machine's --bandwidth in"
            " GB/s and --tflops in TFLOP/s"
        )
    return Device(
        name,
        count,
        bandwidth=count * rate * 1e9,
        bf16_flops=count * bf16 * 1e12,
        memory=room and count * room * 1e9,
    )


class Work(NamedTuple):
    """The work of one part of a pass."""

    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Served:
    """A model on a device: weights in `precision`, a KV cache with `kv_bytes` bytes per number, and
    `launch` seconds of overhead per layer of a forward pass."""

    shape: ModelShape
    device: Device
    precision: str
    kv_bytes: float = 2.0
    launch: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory, embedding table included."""
        tables = self.shape.table_weights
        return (self.shape.parameters - tables) * PRECISIONS[self.precision] + tables * TABLE_BYTES

    def cache_bytes(self, context: int) -> float:
        """Return the bytes of one sequence's KV cache; full windows do not grow."""
        return self.shape.attended(context) * self.shape.kv_values * self.kv_bytes

    def seconds(self, *, batch: int, tokens: int, context: int) -> float:
        """Return the seconds of one pass over `tokens` new tokens of each of `batch` sequences with
        `context` cached tokens each."""
        bandwidth, rate = self.device.bandwidth, self.device.bf16_flops
        parts = self.parts(batch=batch, tokens=tokens, context=context)
        times = [max(part.bytes / bandwidth, part.flops / rate) for part in parts]
        return self.launch * self.shape.layers + sum(times)

    def parts(self, *, batch: int, tokens: int, context: int) -> tuple[Work, Work, Work, Work]:
        """Return the work of such a pass: dense weights, experts, head, attention. A sequence's KV
        cache is read once for all its tokens."""
        shape, rows, experts = self.shape, batch * tokens, self.shape.experts
        width, dense, head = PRECISIONS[self.precision], shape.dense_weights, shape.head_weights
        read = experts.touched(rows) * experts.weights if experts else 0.0
        used = experts.per_token * experts.weights if experts else 0
        attended = float(rows) * shape.attention_flops * shape.attended(context)
        return (
            Work(dense * width, 2.0 * dense * rows),
            Work(read * width, 2.0 * used * rows),
            Work(head * TABLE_BYTES, 2.0 * head * rows),
            Work(batch * self.cache_bytes(context), attended),
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` sequences of `context` tokens each decode together. `draft` None: proposals that cost
    nothing (n-gram lookup, predicted outputs)."""

    target: Served
    draft: Served | None
    batch: int
    context: int

    def target_seconds(self, k: int) -> float:
        """Return a target pass's seconds for one committed and `k` draft tokens per sequence."""
        return self.target.seconds(batch=self.batch, tokens=k + 1, context=self.context)

    @property
    def draft_seconds(self) -> float:
        """Seconds of one draft step: one token for every sequence."""
        if self.draft is None:
            return 0.0
        return self.draft.seconds(batch=self.batch, tokens=1, context=self.context)

    @property
    def draft_cost(self) -> float:
        """The cost of a draft step in plain target steps: Leviathan's c."""
        return self.draft_seconds / self.target_seconds(0)

    def verify_cost(self, k: int) -> float:
        """Return the cost of a target pass with `k` draft tokens in plain target steps."""
        return self.target_seconds(k) / self.target_seconds(0)

    def round_cost(self, k: int) -> float:
        """Return the cost of a round with `k` draft tokens in plain target steps."""
        return k * self.draft_cost + self.verify_cost(k)

    def speed_up(self, acceptance: float, k: int) -> float:
        """Return tokens per second relative to plain decoding."""
        return expected_tokens(acceptance, k) / self.round_cost(k)

    def best(self, acceptance: float, k_max: int) -> tuple[int, float]:
        """Return the best K in 0..k_max and its speed-up, which is 1.0 for K = 0."""
        return best([self.speed_up(acceptance, k) for k in range(k_max + 1)])

    @property
    def models(self) -> tuple[Served, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def weight_bytes(self) -> float:
        return sum(model.weight_bytes for model in self.models)

    @property
    def fits(self) -> bool | None:
        """Whether weights and all KV caches fit in memory; None: the memory is unknown."""
        memory = self.target.device.memory
        cache = self.batch * sum(model.cache_bytes(self.context) for model in self.models)
        return None if memory is None else self.weight_bytes + cache <= memory

    @property
    def kv_tokens(self) -> int | None:
        """How many tokens' KV cache fits beside the weights; None: the memory is unknown."""
        memory = self.target.device.memory
        per_token = sum(m.shape.kv_values_per_token * m.kv_bytes for m in self.models)
        return None if memory is None else max(0, int((memory - self.weight_bytes) / per_token))

    @property
    def within_positions(self) -> bool:
        """Whether all models can serve sequences of this length."""
        limits = [model.shape.served_positions for model in self.models]
        return all(limit is None or self.context <= limit for limit in limits)


def expected_tokens(acceptance: float, k: int) -> float:
    """Return the expected tokens of a round with `k` draft tokens, each accepted with probability a
    if all before it were: (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv:2211.17192)."""
    return math.fsum(acceptance**i for i in range(k + 1))


def best(speeds: Sequence[float]) -> tuple[int, float]:
    """Return the fastest K (the smallest of equals) and its speed-up. Checks every K, because with
    mixtures of experts the curve has several local maxima."""
    return speeds.index(max(speeds)), max(speeds)


def break_even(k: int, round_cost: float) -> float | None:
    """Return the acceptance at which a round of `k` draft tokens, costing `round_cost` plain steps,
    is as fast as plain decoding; None if even full acceptance would not pay."""
    if round_cost >= k + 1:
        return None
    steps = 10**9  # resolution of the acceptance
    found = bisect_left(range(steps), round_cost, key=lambda i: expected_tokens(i / steps, k))
    return found / steps
