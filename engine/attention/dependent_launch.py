"""Kernels that are launched while the one before them ends (programmatic dependent launch, compute
capability 9.0): a forward is hundreds of short ones, and a launch takes about a microsecond."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """First in a kernel. What kernels before this one wrote may be read after it, and only then may
    the next one begin: so what that reads of any earlier one is there, too."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


def launch_options(tensor: Tensor) -> dict[str, Any]:
    """Of a kernel that begins with `await_inputs` and works on this."""
    overlaps = tensor.is_cuda and _capable(tensor.device)
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}


@cache
def _capable(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
