"""PackedCopy: the numbers that a step sends to the device, in one copy.

Parts are adjacent in a host buffer and in an equal device buffer. A user reserves a part before
`build`, writes to its host side, and computes with its device side, whose address is fixed, as CUDA
graphs need. `send` copies all parts at once, and of the last one, which is for data of varying
size, only the rows in use. For CUDA, the copy goes through pinned buffers, each reused once the
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
APART = 4  # alignment of parts in words, which Triton's kernels require
PLACES = 16  # copies in progress at once, at most


class Part:
    """Numbers of one shape: `host`, an array, and `there`, a device tensor that equals it after
    `send`. Initially zeros. Of the last part, `used` rows are sent."""

    host: npt.NDArray[Any]
    there: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.used, self.words = shape[0], prod(shape[1:]) * dtype.itemsize // 4  # of a row


class PackedCopy:
    """Call `part` for each part first, then `build`, then `send` any number of times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Part] = []

    def part(self, *shape: int, dtype: torch.dtype = torch.int32) -> Part:
        """Reserve a part of int32, int64 or float32."""
        self._parts.append(Part(shape, dtype))
        return self._parts[-1]

    def build(self) -> None:
        """Allocate all parts."""
        sizes = [part.shape[0] * part.words for part in self._parts]
        ends = np.cumsum([-(-size // APART) * APART for size in sizes]).tolist()
        self._firsts = firsts = [0, *ends[:-1]]
        self._there = torch.zeros(ends[-1], dtype=torch.int32, device=self._device)
        self._numbers = numbers = np.zeros(ends[-1], np.int32)
        self._copy = _copy_to(self._there.device)
        for part, first, size in zip(self._parts, firsts, sizes, strict=True):
            last = first + size
            part.host = numbers[first:last].view(KINDS[part.dtype]).reshape(part.shape)
            part.there = self._there[first:last].view(part.dtype).view(part.shape)

    def send(self, along: npt.NDArray[np.int64] | None = None) -> Tensor | None:
        """Copy all parts; the host does not wait and may write again at once. `along`: more numbers
        to send. Returns a tensor that holds them on the device until the next `send`, or None."""
        last = self._parts[-1]
        size, there = self._firsts[-1] + last.used * last.words, None
        if along is not None:
            first = -(-size // APART) * APART
            if first + 2 * len(along) > len(self._numbers):
                there = sent_alone(along, self._device)  # it does not fit
            else:
                size = first + 2 * len(along)
                self._numbers[first:size].view(np.int64)[:] = along
                there = self._there[first:size].view(torch.int64)
        self._copy(self._numbers[:size], self._there.narrow(0, 0, size))
        return there


def sent_alone(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return these numbers on the device, in a separate copy that the host does not wait for."""
    there = torch.empty(len(numbers), dtype=torch.int64, device=device)
    _copy_to(there.device)(numbers.view(np.int32), there.view(torch.int32))
    return there


@cache
def _copy_to(device: torch.device) -> Callable[[Words, Tensor], object]:
    if device.type == "cuda":
        return _Places(device).send
    return lambda numbers, there: there.copy_(torch.from_numpy(numbers))


class _Places:
    """Pinned buffers, used in turn, each with an event that tells when the device has read it.
    Thread-safe, since a new draft is checked in a thread while steps run."""

    def __init__(self, device: torch.device) -> None:
        # Stored: looking it up takes the host longer than recording an event.
        self._stream, self._next = torch.cuda.current_stream(device), 0
        self._lock = threading.Lock()
        self._held = [self._place(0) for _ in range(PLACES)]

    def _place(self, words: int) -> tuple[Tensor, Words, Any]:
        pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
        return pinned, pinned.numpy(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, numbers: Words, there: Tensor) -> None:
        with self._lock:
            size, self._next = len(numbers), (self._next + 1) % PLACES
            pinned, host, read = self._held[self._next]
            if size > len(host):  # torch keeps the old one until it is read
                self._held[self._next] = pinned, host, read = self._place(1 << size.bit_length())
            elif not read.query():
                read.synchronize()
            host[:size] = numbers
            there.copy_(pinned.narrow(0, 0, size), non_blocking=True)
            read.record(self._stream)
