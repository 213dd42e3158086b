"""A replacement of the package flashinfer on the stand-in: it plans with the same copies, and a run
is one launch.

`BatchPrefillWithPagedKVCacheWrapper.plan` of version 0.7 copies its arguments, wherever they lie,
to the buffers of its graph, and its result (a schedule of tiles, in a page-locked workspace) to the
device, without waiting. The host time of the real plan is not modelled.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.fake_flashinfer import PagedPrefill

ARRAYS = 8  # arrays of the schedule (approximate), with an int32 per tile
WORKSPACE = 8 << 20  # bytes of the schedule's workspace


class Planned(PagedPrefill):
    """A wrapper whose output values mean nothing."""

    def __init__(self, float_workspace_buffer: Tensor, *given: Any, **buffers: Any) -> None:
        super().__init__(float_workspace_buffer, *given, **buffers)
        self._made = torch.empty(WORKSPACE, dtype=torch.uint8, pin_memory=True)
        self._there = self._made.to(float_workspace_buffer.device)

    def plan(self, qo_indptr: Tensor, *given: Any, **more: Any) -> None:
        super().plan(qo_indptr, *given, **more)
        size = 4 * ARRAYS * len(qo_indptr)
        self._there[:size].copy_(self._made[:size], non_blocking=True)

    def run(self, q: Tensor, paged_kv_cache: Any, *, return_lse: bool = False) -> Any:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return (q.clone(), lse) if return_lse else q.clone()


def install() -> None:
    """Make `import flashinfer` find this replacement."""
    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Planned
    sys.modules["flashinfer"] = module
