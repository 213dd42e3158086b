"""The package flashinfer over the stand-in: what planning asks of the device, and a launch for a
run.

`BatchPrefillWithPagedKVCacheWrapper.plan` of 0.7 copies what it is given into the buffers of its
graph, from wherever that lies, and what it made of it (a schedule of tiles, in one page-locked
workspace of its own) to the device, without a wait. How long it thinks is not known here.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.fake_flashinfer import PagedPrefill

ARRAYS = 8  # of the schedule, about, with an int32 for each of its tiles
WORKSPACE = 8 << 20  # bytes of it


class Planned(PagedPrefill):
    """Whose numbers mean nothing."""

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
    """For `import flashinfer`."""
    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Planned
    sys.modules["flashinfer"] = module
