"""KVCache: one block numbering, one plane of tensors per model.

Owns the memory of keys and values and the plan of how many blocks fit. A slot is
`block * block_size + offset` and means the same position in every plane, so one allocator, one
prefix cache and one preemption serve target and drafter. Who holds which block is the block
pool's business; writing and reading during a forward is the attention backend's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import LayerShape
from engine.config import CacheConfig, ScheduleConfig
from engine.errors import MemoryPlanError

GIB = 1 << 30


class Plane:
    """One model's keys and values; layers of one shape share a pair of tensors
    `[layers, kv_heads, slots, dim]`, so that one slice serves all of them, and so that a head's
    keys in consecutive slots are one run of memory."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.where: dict[int, tuple[int, int]] = {}
        self.stacks: list[tuple[Tensor, Tensor]] = []
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for layer in layers:
            shape = (layer.kv_heads, layer.key_dim, layer.value_dim)
            shapes.setdefault(shape, []).append(layer.layer)
        slots = num_blocks * block_size
        for stack, ((heads, key_dim, value_dim), members) in enumerate(shapes.items()):
            for index, member in enumerate(members):
                self.where[member] = (stack, index)
            sizes = ((len(members), heads, slots, dim) for dim in (key_dim, value_dim))
            keys, values = (torch.zeros(size, dtype=dtype, device=device) for size in sizes)
            self.stacks.append((keys, values))


class KVCache:
    """`num_blocks` blocks of `block_size` tokens; planes are added at start, before any forward."""

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | str) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.planes: dict[str, Plane] = {}

    def add_plane(self, name: str, layers: Sequence[LayerShape], dtype: torch.dtype) -> Plane:
        """A plane for one model (`LoadedModel.layers`, `.dtype`)."""
        assert name not in self.planes
        plane = Plane(
            layers,
            self.num_blocks,
            block_size=self.block_size,
            dtype=dtype,
            device=self.device,
        )
        self.planes[name] = plane
        return plane

    @torch.inference_mode()
    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the KV of slots to other slots, in every plane and layer. All are read before any
        is written, so the two lists may overlap."""
        assert len(source) == len(destination)
        if not source or list(source) == list(destination):
            return
        read = torch.tensor(list(source), device=self.device)
        write = torch.tensor(list(destination), device=self.device)
        for plane in self.planes.values():
            for pair in plane.stacks:
                for tensor in pair:
                    tensor.index_copy_(2, write, tensor.index_select(2, read))


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """KV bytes of one token in one model's plane."""
    elements = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return elements * dtype.itemsize


def free_bytes(config: CacheConfig, device: torch.device) -> int:
    """Memory granted to the KV cache: a fixed sum on a CPU; on CUDA the configured fraction of
    the device less what is in use (the weights are loaded by now)."""
    if device.type != "cuda":
        return int(config.cpu_memory_gib * GIB)
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.memory_fraction) - (total - free)


def plan_blocks(
    config: CacheConfig,
    schedule: ScheduleConfig,
    *,
    token_bytes: int,
    max_model_len: int,
    granted: int,
) -> int:
    """How many blocks to allot: what `granted` bytes hold, at most what `max_sequences` sequences
    of `max_model_len` tokens could ever use. `token_bytes` is the sum over all planes.

    Demanded is room for one sequence of `max_model_len` tokens; an explicit `num_blocks` is taken
    as it is if it fits the memory and is at least 2 (longer sequences then end early).
    Raises MemoryPlanError with the numbers.
    """
    block_bytes = token_bytes * config.block_size
    affordable = max(granted, 0) // block_bytes
    gib = f"{max(granted, 0) / GIB:.2f} GiB"
    if config.num_blocks is not None:
        if config.num_blocks < 2:
            raise MemoryPlanError(f"cache.num_blocks is {config.num_blocks}; at least 2 are needed")
        if config.num_blocks > affordable:
            raise MemoryPlanError(
                f"cache.num_blocks is {config.num_blocks}, which takes "
                f"{config.num_blocks * block_bytes / GIB:.2f} GiB; the KV cache may use {gib}, "
                f"enough for {affordable} blocks"
            )
        return config.num_blocks
    one_sequence = -(-max_model_len // config.block_size)
    if affordable < one_sequence:
        raise MemoryPlanError(
            f"one sequence of {max_model_len} tokens needs {one_sequence} KV blocks "
            f"({one_sequence * block_bytes / GIB:.2f} GiB), but the KV cache may use {gib}; "
            "lower target.max_model_len or raise cache.cpu_memory_gib (CPU) or "
            "cache.memory_fraction (GPU)"
        )
    return max(2, min(affordable, schedule.max_sequences * one_sequence))
