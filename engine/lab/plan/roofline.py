"""The time of a forward pass and of a round from a roofline (Williams et al., CACM 2009).

Each part of a pass takes the longer of moving its bytes and doing its arithmetic; the parts follow
one another, so their times add up. Left out: activations, writing the new keys and values,
sampling, communication between devices. What is left is the least time that the hardware allows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.lab.plan.shape import ModelShape

# Bytes of a weight inside the layers; int4: 128 weights share one 16-bit scale. Embeddings and the
# output head stay in 16 bits, as in published quantised checkpoints.
PRECISIONS = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 2 / 128}
TABLE_BYTES = 2.0
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}
CUSTOM = "cpu"  # any machine: the caller gives its figures, or `machine` measures them


@dataclass(frozen=True, slots=True)
class Device:
    """`count` devices that share every matrix evenly; all figures are those of all of them, as the
    makers' data sheets state them: bytes/s, and FLOPs per second dense (no structured sparsity),
    with accumulation in 32 bits; `fp8_flops` None: no such units. `memory` in bytes, None: not
    known, so that nothing is said about what fits."""

    name: str
    count: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    memory: float | None

    def flops(self, precision: str) -> float:
        """For weights in this precision. int4 weights are multiplied in bf16, and so are fp8 ones
        where the device has no fp8 units."""
        return self.fp8_flops or self.bf16_flops if precision == "fp8" else self.bf16_flops


# GB/s, TFLOP/s in bf16 and fp8, GB.
DEVICES: dict[str, tuple[float, float, float | None, float]] = {
    "h100-sxm": (3350, 989.4, 1978.9, 80),
    "h200": (4800, 989.4, 1978.9, 141),
    "a100-80": (2039, 312, None, 80),
    "l4": (300, 121, 242, 24),
    "l40s": (864, 362, 733, 48),
    "rtx-4090": (1008, 165.2, 330.3, 24),
    "rtx-3090": (936, 71, None, 24),
    "mi300x": (5300, 1307.4, 2614.9, 192),
}


def device_of(
    name: str, count: int = 1, *, bandwidth: float | None = None, tflops: float | None = None,
    memory: float | None = None,
) -> Device:  # fmt: skip
    """`count` of a preset under tensor parallelism, with the caller's figures (GB/s, TFLOP/s, GB of
    one device) in place of its own. Raises ConfigError for any machine without figures."""
    sheet = DEVICES.get(name, (bandwidth, tflops, None, memory))
    rate, bf16, room = bandwidth or sheet[0], tflops or sheet[1], memory or sheet[3]
    fp8 = None if tflops else sheet[2]
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
        fp8_flops=fp8 and count * fp8 * 1e12,
        memory=room and count * room * 1e9,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Of one part of a pass. `rate` in FLOPs per second."""

    bytes: float
    flops: float
    rate: float


@dataclass(frozen=True, slots=True)
class Served:
    """A model on a device: its weights in `precision`, its cache in `kv_bytes` a number, and
    `launch` seconds of overhead for every layer of a forward pass."""

    shape: ModelShape
    device: Device
    precision: str
    kv_bytes: float = 2.0
    launch: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """What the weights occupy in memory, the embedding table included."""
        tables = self.shape.table_weights
        return (self.shape.parameters - tables) * PRECISIONS[self.precision] + tables * TABLE_BYTES

    @property
    def kv_bytes_per_token(self) -> float:
        return self.shape.kv_values_per_token * self.kv_bytes

    def cache_bytes(self, context: int) -> float:
        """What the keys and values of one sequence occupy; full windows do not grow."""
        return self.shape.attended(context) * self.shape.kv_values * self.kv_bytes

    def seconds(self, *, batch: int, tokens: int, context: int) -> float:
        """Of one pass over `tokens` new tokens of each of `batch` sequences, all of which have
        `context` tokens in the cache."""
        bandwidth = self.device.bandwidth
        parts = self.parts(batch=batch, tokens=tokens, context=context)
        times = [max(part.bytes / bandwidth, part.flops / part.rate) for part in parts]
        return self.launch * self.shape.layers + sum(times)

    def parts(self, *, batch: int, tokens: int, context: int) -> tuple[Work, Work, Work, Work]:
        """Of such a pass: dense weights, experts, head, attention. A sequence's cache is read once
        for all of its tokens."""
        shape, rows, experts = self.shape, batch * tokens, self.shape.experts
        rate, wide = self.device.flops(self.precision), self.device.flops("bf16")
        width, dense, head = PRECISIONS[self.precision], shape.dense_weights, shape.head_weights
        read = experts.touched(rows) * experts.weights if experts else 0.0
        used = experts.per_token * experts.weights if experts else 0
        attended = float(rows) * shape.attention_flops * shape.attended(context)
        return (
            Work(dense * width, 2.0 * dense * rows, rate),
            Work(read * width, 2.0 * used * rows, rate),
            Work(head * TABLE_BYTES, 2.0 * head * rows, wide),
            Work(batch * self.cache_bytes(context), attended, wide),
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` sequences decode together with `context` tokens each. `draft` None: guesses that
    cost nothing (n-gram lookup, predictions)."""

    target: Served
    draft: Served | None
    batch: int
    context: int

    def target_seconds(self, k: int) -> float:
        """One target pass over a committed token and `k` guesses of every sequence."""
        return self.target.seconds(batch=self.batch, tokens=k + 1, context=self.context)

    @property
    def draft_seconds(self) -> float:
        """One draft step: one token for every sequence."""
        if self.draft is None:
            return 0.0
        return self.draft.seconds(batch=self.batch, tokens=1, context=self.context)

    @property
    def draft_cost(self) -> float:
        """A draft step in units of a plain target step: Leviathan's c."""
        return self.draft_seconds / self.target_seconds(0)

    def verify_cost(self, k: int) -> float:
        """A target pass with `k` guesses in plain target steps."""
        return self.target_seconds(k) / self.target_seconds(0)

    def round_cost(self, k: int) -> float:
        """A round with `k` guesses in plain target steps."""
        return k * self.draft_cost + self.verify_cost(k)

    def speed_up(self, acceptance: float, k: int) -> float:
        """Tokens per second against plain decoding."""
        return expected_tokens(acceptance, k) / self.round_cost(k)

    def best(self, acceptance: float, k_max: int) -> tuple[int, float]:
        """The best K of 0..k_max and its speed-up; K = 0 is 1.0."""
        return best([self.speed_up(acceptance, k) for k in range(k_max + 1)])

    @property
    def models(self) -> tuple[Served, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def weight_bytes(self) -> float:
        return sum(model.weight_bytes for model in self.models)

    @property
    def fits(self) -> bool | None:
        """Whether weights and the cache of all sequences fit the memory; None: it is not known."""
        memory = self.target.device.memory
        cache = self.batch * sum(model.cache_bytes(self.context) for model in self.models)
        return None if memory is None else self.weight_bytes + cache <= memory

    @property
    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values fit beside the weights; None: the memory is not known."""
        memory = self.target.device.memory
        per_token = sum(model.kv_bytes_per_token for model in self.models)
        return None if memory is None else max(0, int((memory - self.weight_bytes) / per_token))

    @property
    def within_positions(self) -> bool:
        """Whether both models are served up to this length."""
        limits = [model.shape.served_positions for model in self.models]
        return all(limit is None or self.context <= limit for limit in limits)


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round with `k` guesses, each kept with this chance if those before it were:
    (1 - a^(k+1)) / (1 - a), from 1 to k+1 (Leviathan et al., arXiv:2211.17192)."""
    return math.fsum(acceptance**i for i in range(k + 1))


def best(speeds: Sequence[float]) -> tuple[int, float]:
    """The fastest K, the smallest one of equals, and its speed-up. All are looked at: with mixtures
    of experts the curve has more than one hump."""
    return speeds.index(max(speeds)), max(speeds)


def break_even(k: int, round_cost: float) -> float | None:
    """The acceptance at which `k` guesses are as fast as none, if a round of them takes
    `round_cost` plain steps; None if not even perfect guesses would pay."""
    if round_cost >= k + 1:
        return None
    steps = 10**9  # of the acceptance from 0 to 1
    found = bisect_left(range(steps), round_cost, key=lambda i: expected_tokens(i / steps, k))
    return found / steps
