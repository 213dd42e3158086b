"""PackedCopy: the numbers that a step sends to the device, in one copy.

They lie side by side in one buffer on the host and in a twin on the device. Who needs some reserves
a part before `build`, writes to the host's side of it, and computes with the device's side, which
stays where it is, as graphs need; `send` copies all parts at once. For CUDA the numbers go through
page-locked memory of their own, which torch keeps until the device has read it: several forwards of
a step, and steps that draw nothing, are sent without a wait in between.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KINDS: dict[torch.dtype, type[np.generic]] = {torch.int32: np.int32, torch.float32: np.float32}


class Part:
    """Numbers of one shape: `host`, an array, and `there`, a tensor of the same numbers on the
    device once they were sent. Zeros at first."""

    host: npt.NDArray[Any]
    there: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


class PackedCopy:
    """`part`s first, then `build`, then any number of `send`s."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Part] = []

    def part(self, *shape: int, dtype: torch.dtype = torch.int32) -> Part:
        """Of 32 bits a number: int32 or float32."""
        self._parts.append(Part(shape, dtype))
        return self._parts[-1]

    def build(self) -> None:
        """Allot all parts."""
        size = sum(prod(part.shape) for part in self._parts)
        self._host = torch.zeros(size, dtype=torch.int32)
        self._there = torch.zeros(size, dtype=torch.int32, device=self._device)
        numbers, first = self._host.numpy(), 0
        for part in self._parts:
            last = first + prod(part.shape)
            part.host = numbers[first:last].view(KINDS[part.dtype]).reshape(part.shape)
            part.there = self._there[first:last].view(part.dtype).view(part.shape)
            first = last

    def send(self) -> None:
        """The host does not wait for it, and may write again at once."""
        on_cuda = self._device.type == "cuda"
        given = self._host.pin_memory() if on_cuda else self._host
        self._there.copy_(given, non_blocking=True)
