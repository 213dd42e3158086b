"""The memory plan: sizes of all parts, computed before anything is allocated, logged at start.

Pure arithmetic over bytes, and two facts: how much memory this process may still use (the
container's limit counts), and how many parameters a folder of safetensors holds (so that weights
that cannot fit are refused before they are read).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.config import CacheConfig, ScheduleConfig
from engine.errors import MemoryPlanError

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
LARGEST_GRAPH = 512  # rows; above, launch overhead is small next to compute
NO_LIMIT = 1 << 60  # control groups v1 write about this for "no limit"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One line of the plan, in bytes."""

    name: str
    size: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`limit`: bytes that all parts may use together; `blocks` of `block_size` tokens each."""

    device: str
    limit: int
    parts: tuple[MemoryUse, ...]
    blocks: int
    block_size: int

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table that is logged at start."""
        total = sum(part.size for part in self.parts)
        yield f"memory plan on {self.device}: {gib(total)} of {gib(self.limit)}"
        for part in self.parts:
            yield f"  {part.name:<22}{gib(part.size):>12}  {part.note}".rstrip()
        tokens = self.blocks * self.block_size
        yield f"  room for {tokens} tokens in {self.blocks} blocks of {self.block_size}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes by part, and the limit."""
        return {**{part.name: part.size for part in self.parts}, "limit": self.limit}


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def plan_memory(
    cache: CacheConfig,
    schedule: ScheduleConfig,
    *,
    device: str,
    weights: tuple[MemoryUse, ...],
    reserved: tuple[MemoryUse, ...],
    token_bytes: dict[str, int],
    max_model_len: int,
    limit: int,
    kv_limit: int | None = None,
    table_bytes: int = 0,
) -> MemoryPlan:
    """Return the plan: everything but the KV cache has the given size; the cache gets the rest of
    `limit`, at most `kv_limit`. `token_bytes`: KV bytes per token, by plane; `table_bytes`:
    attention tables, per block. Raises MemoryPlanError."""
    taken = sum(part.size for part in (*weights, *reserved))
    if (left := limit - taken) < 0:
        what = ", ".join(f"{part.name} {gib(part.size)}" for part in (*weights, *reserved))
        raise MemoryPlanError(
            f"{gib(taken)} are needed before the KV cache ({what}), but {gib(limit)} may be used "
            f"on {device}; use smaller or quantized weights, lower schedule.max_step_tokens or "
            "raise cache.memory_fraction (GPU)"
        )
    blocks = plan_blocks(
        cache,
        schedule,
        token_bytes=sum(token_bytes.values()),
        table_bytes=table_bytes,
        max_model_len=max_model_len,
        granted=left if kv_limit is None else min(left, kv_limit),
    )
    planes = tuple(
        MemoryUse(f"KV of the {name}", blocks * cache.block_size * size, f"{size} bytes a token")
        for name, size in token_bytes.items()
    )
    tables = (MemoryUse("attention tables", blocks * table_bytes),) if table_bytes else ()
    parts = (*weights, *planes, *tables, *reserved)
    return MemoryPlan(device, limit, parts, blocks, cache.block_size)


def plan_blocks(
    config: CacheConfig,
    schedule: ScheduleConfig,
    *,
    token_bytes: int,
    max_model_len: int,
    granted: int,
    table_bytes: int = 0,
) -> int:
    """Return how many blocks to allocate: as many as fit in `granted` bytes, at most what
    `max_sequences` sequences of `max_model_len` tokens can use. `token_bytes`: sum over all planes;
    `table_bytes`: additional bytes per block.

    At least one sequence of `max_model_len` tokens must fit. An explicit `num_blocks` is used as it
    is if it fits in memory (longer sequences then end early). Raises MemoryPlanError with the
    numbers.
    """
    block_bytes = token_bytes * config.block_size + table_bytes
    affordable = max(granted, 0) // block_bytes
    may_use = gib(max(granted, 0))
    if config.num_blocks is not None:
        if config.num_blocks > affordable:
            raise MemoryPlanError(
                f"cache.num_blocks is {config.num_blocks}, which takes "
                f"{gib(config.num_blocks * block_bytes)}; the KV cache may use {may_use}, "
                f"enough for {affordable} blocks"
            )
        return config.num_blocks
    one_sequence = -(-max_model_len // config.block_size)
    if affordable < one_sequence:
        raise MemoryPlanError(
            f"one sequence of {max_model_len} tokens needs {one_sequence} KV blocks "
            f"({gib(one_sequence * block_bytes)}), but the KV cache may use {may_use}; "
            "lower target.max_model_len or raise cache.cpu_memory_gib (CPU) or "
            "cache.memory_fraction (GPU)"
        )
    return max(2, min(affordable, schedule.max_sequences * one_sequence))


def activation_bytes(
    *, hidden: int, inner: int, vocab: int, item: int, rows: int, logit_rows: int
) -> int:
    """Return the approximate peak bytes of a forward of `rows` rows, with numbers of `item` bytes:
    four hidden vectors and three of the inner layer per row; for each row with logits, the logits,
    their float32 copy and what sampling computes from them."""
    return rows * (4 * hidden + 3 * inner) * item + logit_rows * vocab * (item + 3 * 4)


def buckets(most: int) -> list[int]:
    """Return the row counts that get a graph, ascending, up to the first that holds `most` or to
    `LARGEST_GRAPH`: powers of two to 8, then in steps of an eighth to a third of the size."""
    steps = ((8, 64, 8), (64, 128, 16), (128, 256, 32), (256, LARGEST_GRAPH + 1, 64))
    sizes = [1, 2, 4, *(size for step in steps for size in range(*step))]
    return sizes[: 1 + sum(size < most for size in sizes)]


def refuse_heavy_weights(sizes: dict[str, int], limit: int, device: str) -> None:
    """Raise MemoryPlanError if weights do not fit, before any is read. `sizes`: bytes by role."""
    total = sum(sizes.values())
    if total > limit:
        parts = " and ".join(f"the {role} {gib(size)}" for role, size in sizes.items())
        raise MemoryPlanError(
            f"the weights take {gib(total)} ({parts}), but {gib(limit)} may be used on {device}; "
            "use smaller or quantized weights or a device with more memory"
        )


def weight_bytes_in(folder: Path, item: int) -> int | None:
    """Return the bytes in memory of a folder's safetensors, by their headers: `item` bytes per
    number, quantised tensors as stored. None if none can be read."""
    size = {**dict.fromkeys(("F64", "F32", "F16", "BF16"), item), "I64": 8, "I32": 4, "I16": 2}
    return sum(count * size.get(dtype, 1) for count, dtype in _tensors_in(folder)) or None


def parameters_in(folder: Path) -> int | None:
    """Return how many numbers a folder's safetensors hold, by their headers. None if none can be
    read, or some are quantised: then one stored number may hold several."""
    found = _tensors_in(folder)
    is_unquantised = {dtype for _, dtype in found} <= {"F64", "F32", "F16", "BF16"}
    return sum(count for count, _ in found) or None if is_unquantised else None


def dtypes_in(folder: Path) -> frozenset[str]:
    """Return the number types in a folder's safetensors by their names there (`BF16`, `F32`); empty
    if none can be read."""
    return frozenset(dtype for _, dtype in _tensors_in(folder))


def _tensors_in(folder: Path) -> list[tuple[int, str]]:
    """Return (count of numbers, type) of each tensor; empty if a header cannot be read."""
    tensors: list[tuple[int, str]] = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as weights:
                slices = map(weights.get_slice, weights.keys())
                tensors += [(math.prod(each.get_shape()), each.get_dtype()) for each in slices]
        except (OSError, SafetensorError):
            return []  # the loader reports the error
    return tensors


def available_bytes(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Return the bytes that this process may still use: the machine's free and reclaimable memory,
    at most what the control group's limit leaves (v2 or v1). None if neither is known."""
    machine = _number(meminfo, "MemAvailable")
    sizes = [
        None if machine is None else machine * 1024,
        _left(cgroup, "memory.max", "memory.current", "inactive_file"),
        _left(
            cgroup / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ]
    known = [size for size in sizes if size is not None]
    return max(0, min(known)) if known else None


def _left(group: Path, limit: str, used: str, cached: str) -> int | None:
    """Return the limit minus the used memory that cannot be reclaimed."""
    most, taken = _number(group / limit), _number(group / used)
    if most is None or taken is None or most >= NO_LIMIT:
        return None
    return most - taken + (_number(group / "memory.stat", cached) or 0)


def _number(file: Path, key: str = "") -> int | None:
    """Return the number at the start of the file, or after `key` at the start of a line."""
    try:
        match = re.search(rf"^{key}:?\s*(\d+)", file.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(match[1]) if match else None
