"""PackedCopy: the numbers that a step sends to the device, in one copy.

Each HostDeviceBuffer is a range of one host array and the same range of one device tensor. A user
reserves it before `build`, writes to `host`, and computes with `tensor`, whose address is fixed,
as CUDA graphs need. `send` copies all buffers at once, and of the last one, which is for data of
varying size, only the rows in use. For CUDA, the copy goes through pinned memory, reused once the
device has read it, so the host can send several forwards, and steps that draw nothing, without
waiting in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.int32]

KINDS: dict[torch.dtype, type[np.generic]] = {
    torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32,
}  # fmt: skip
ALIGNMENT = 4  # alignment of buffers in words, which Triton's kernels require
MOST_COPIES = 16  # copies in progress at once, at most


class HostDeviceBuffer:
    """Numbers of one shape: `host`, an array, and `tensor`, a tensor that equals it after
    `send`. Initially zeros. Of the last buffer, `used` rows are sent."""

    host: npt.NDArray[Any]
    tensor: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.used, self.words = shape[0], prod(shape[1:]) * dtype.itemsize // 4  # of a row


class PackedCopy:
    """Call `reserve` for each buffer first, then `build`, then `send` any number of times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[HostDeviceBuffer] = []

    def reserve(self, *shape: int, dtype: torch.dtype = torch.int32) -> HostDeviceBuffer:
        """Reserve a buffer of int32, int64 or float32."""
        self._buffers.append(HostDeviceBuffer(shape, dtype))
        return self._buffers[-1]

    def build(self) -> None:
        """Allocate all buffers."""
        sizes = [buffer.shape[0] * buffer.words for buffer in self._buffers]
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        self._firsts = firsts = [0, *ends[:-1]]
        self._on_device = torch.zeros(ends[-1], dtype=torch.int32, device=self._device)
        self._numbers = numbers = np.zeros(ends[-1], np.int32)
        self._copy = _copy_to(self._on_device.device)
        for buffer, first, size in zip(self._buffers, firsts, sizes, strict=True):
            last = first + size
            buffer.host = numbers[first:last].view(KINDS[buffer.dtype]).reshape(buffer.shape)
            buffer.tensor = self._on_device[first:last].view(buffer.dtype).view(buffer.shape)

    def send(self, extra: npt.NDArray[np.int64] | None = None) -> Tensor | None:
        """Copy all buffers; the host does not wait and may write again at once. `extra`: more
        numbers to send. Returns them as a device tensor, valid until the next `send`, or None."""
        last = self._buffers[-1]
        size, sent = self._firsts[-1] + last.used * last.words, None
        if extra is not None:
            first = -(-size // ALIGNMENT) * ALIGNMENT
            if first + 2 * len(extra) > len(self._numbers):
                sent = copied_to_device(extra, self._device)  # it does not fit
            else:
                size = first + 2 * len(extra)
                self._numbers[first:size].view(np.int64)[:] = extra
                sent = self._on_device[first:size].view(torch.int64)
        self._copy(self._numbers[:size], self._on_device.narrow(0, 0, size))
        return sent


def copied_to_device(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return these numbers on the device, in a separate copy that the host does not wait for."""
    tensor = torch.empty(len(numbers), dtype=torch.int64, device=device)
    _copy_to(tensor.device)(numbers.view(np.int32), tensor.view(torch.int32))
    return tensor


@cache
def _copy_to(device: torch.device) -> Callable[[Words, Tensor], object]:
    if device.type == "cuda":
        return _PinnedBuffers(device).send
    return lambda numbers, tensor: tensor.copy_(torch.from_numpy(numbers))


class _PinnedBuffers:
    """Pinned buffers, used in turn, each with an event that tells when the device has read it.
    Thread-safe, since a new draft is checked in a thread while steps run."""

    def __init__(self, device: torch.device) -> None:
        # Stored: looking it up takes the host longer than recording an event.
        self._stream, self._next = torch.cuda.current_stream(device), 0
        self._lock = threading.Lock()
        self._held = [self._allocate(0) for _ in range(MOST_COPIES)]

    def _allocate(self, words: int) -> tuple[Tensor, Words, Any]:
        pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
        return pinned, pinned.numpy(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, numbers: Words, tensor: Tensor) -> None:
        with self._lock:
            size, self._next = len(numbers), (self._next + 1) % MOST_COPIES
            pinned, host, read = self._held[self._next]
            if size > len(host):  # torch keeps the old one until it is read
                self._held[self._next] = pinned, host, read = self._allocate(1 << size.bit_length())
            elif not read.query():
                read.synchronize()
            host[:size] = numbers
            tensor.copy_(pinned.narrow(0, 0, size), non_blocking=True)
            read.record(self._stream)
