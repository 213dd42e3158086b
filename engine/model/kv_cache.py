"""KVCache: one block numbering, one plane of tensors per model.

Owns the memory of keys and values; `scheduling.memory` decides how many blocks fit. A slot is
`block * block_size + offset` and means the same position in every plane, so target and draft share
one allocator, one prefix cache and one preemption. The block pool assigns blocks to sequences; the
attention backend writes and reads them during a forward.

On a CPU the cache is in huge pages: a forward reads more pages of 4 KiB than the TLB holds, and on
a virtual machine each TLB miss takes two lookups.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import LayerShape, raw_view
from engine.errors import MemoryPlanError
from engine.scheduling.memory import gib

HUGE_PAGE = 1 << 21  # bytes
_POPULATE = 23  # MADV_POPULATE_WRITE, since Linux 5.14; keeps the contents
_AT_ONCE = 16 * HUGE_PAGE  # bytes per call of madvise
_LINE = 64  # bytes of a CPU cache line, which no vector should cross


class Plane:
    """One model's keys and values. Layers of one shape share a pair of tensors `[layers, kv_heads,
    slots, dim]`, so one slice serves all of them, and a head's keys in consecutive slots are
    contiguous in memory."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        later: bool = False,
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
            keys, values = (_zeros(size, dtype, device, later=later) for size in sizes)
            self.stacks.append((keys, values))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.stacks for tensor in pair)


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device, *, later: bool) -> Tensor:
    """Return zeros. On a CPU, touches every page unless `later`, so that a lack of memory shows at
    start. Raises MemoryPlanError."""
    if device.type != "cpu":
        return torch.zeros(tuple(size), dtype=dtype, device=device)
    needed = prod(size) * dtype.itemsize
    try:
        memory = space(needed)
    except OSError as error:  # limits of the process may be below the machine's memory
        raise MemoryPlanError(
            f"the system refuses {gib(needed)} for keys or values ({error.strerror}): lower "
            "cache.cpu_memory_gib or raise the limits of this process"
        ) from error
    if not later:
        memory[:: mmap.PAGESIZE] = 0
    return torch.from_numpy(memory).view(dtype).view(tuple(size))


class KVCache:
    """`num_blocks` blocks of `block_size` tokens; planes are added at start, before any forward.
    `dtype`: of all planes, instead of each model's own. With `padding_block`, planes have one more
    block, number `num_blocks`, which no sequence ever holds. `later`: on a CPU, pages are touched
    when they are first written, or by `populate`. `blocks`: those that the owner of this cache may
    write: all, except in a `part`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        *,
        padding_block: bool = False,
        dtype: torch.dtype | None = None,
        later: bool = False,
    ) -> None:
        self.later = later
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.padding_block = num_blocks if padding_block else None
        self.dtype = dtype
        self.planes: dict[str, Plane] = {}
        self.blocks: Sequence[int] = range(num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the planes added so far."""
        return sum(plane.nbytes for plane in self.planes.values())

    def part(self, blocks: Sequence[int]) -> KVCache:
        """Return a cache with the same planes, including any added later, and only these `blocks`:
        for one of several engines with the same models."""
        part = copy(self)
        part.blocks = blocks
        return part

    def beside(self) -> KVCache:
        """Return a cache of the same blocks without planes, for a model that may take over."""
        twin = copy(self)
        twin.planes = {}
        return twin

    def add_plane(self, name: str, layers: Sequence[LayerShape], dtype: torch.dtype) -> Plane:
        """Add and return a plane for one model (`LoadedModel.layers`, `.dtype`)."""
        assert name not in self.planes
        plane = Plane(
            layers,
            self.num_blocks + (self.padding_block is not None),
            block_size=self.block_size,
            dtype=self.dtype or dtype,
            device=self.device,
            later=self.later,
        )
        self.planes[name] = plane
        return plane

    def populate(self) -> threading.Thread:
        """Start a thread that touches all pages not touched yet; safe during writes. Returns it."""
        pairs = [pair for plane in self.planes.values() for pair in plane.stacks]
        tensors = [tensor for pair in pairs for tensor in pair if tensor.device.type == "cpu"]
        touching = threading.Thread(target=_populate, args=(tensors,), name="cache", daemon=True)
        touching.start()
        return touching

    def move_path(self, blocks: Sequence[int], before: int, path: Sequence[int]) -> int:
        """Move the KV of the accepted nodes of a token tree to where a chain would have written it.
        `before`: tokens of the sequence before the tree, whose node i was written at position
        `before + i`; `path`: the accepted nodes, in order. Returns the position before which
        nothing moved: KV that a draft wrote along its own chain is valid up to there."""
        if not path or path[-1] == len(path) - 1:  # nodes ascend, so this is 0, 1, 2, ...
            return before + len(path)
        size = self.block_size

        def slot(position: int) -> int:
            return blocks[position // size] * size + position % size

        source = [slot(before + node) for node in path]
        self.move(source, [slot(before + i) for i in range(len(path))])
        return before + next(i for i, node in enumerate(path) if node != i)

    @torch.inference_mode()
    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy the KV of slots to other slots, in every plane and layer. Each tensor is read before
        it is written, so the two lists may overlap."""
        assert len(source) == len(destination)
        if not source or list(source) == list(destination):
            return
        read = torch.tensor(list(source), device=self.device)
        write = torch.tensor(list(destination), device=self.device)
        for plane in self.planes.values():
            for pair in plane.stacks:
                for tensor in map(raw_view, pair):
                    tensor.index_copy_(2, write, tensor.index_select(2, read))


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """KV bytes of one token in one model's plane."""
    elements = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return elements * dtype.itemsize


def space(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` bytes of zeros, in huge pages where Linux offers them, and aligned so that only
    whole ones are used. Less than half a huge page is aligned to a cache line."""
    if 2 * size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _from_border(np.zeros(size + _LINE, np.uint8), _LINE, size)
    pages = -(-size // HUGE_PAGE)
    whole = mmap.mmap(-1, (pages + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        whole.madvise(mmap.MADV_HUGEPAGE)
    return _from_border(np.frombuffer(whole, np.uint8), HUGE_PAGE, size)


def _populate(tensors: Sequence[Tensor]) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return
    advise = ctypes.CDLL(None).madvise  # releases the GIL, unlike mmap.madvise
    for tensor in tensors:
        for first in range(0, tensor.nbytes, _AT_ONCE):
            start = ctypes.c_void_p(tensor.data_ptr() + first)
            size = min(_AT_ONCE, tensor.nbytes - first)
            if advise(start, ctypes.c_size_t(size), _POPULATE):
                break  # the kernel is too old, or the tensor is not aligned to a page


def _from_border(memory: npt.NDArray[np.uint8], of: int, size: int) -> npt.NDArray[np.uint8]:
    first = -memory.ctypes.data % of
    return memory[first : first + size]
