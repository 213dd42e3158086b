"""FlashInfer's paged prefill wrapper as its documentation defines it, implemented in torch.

Replaces the package where there is no GPU. Refuses what the original refuses: in graph mode another
batch size or more pages than its buffers hold, rows that were not planned, and a mask after a first
plan without one (FA3's kernel, chosen then on compute capability 9.0, has none)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the method's reads from Waits: the original reads on the host or in a kernel."""

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*arguments, **named)

    return run


class PagedPrefill:
    """`BatchPrefillWithPagedKVCacheWrapper` of flashinfer-python 0.7, layout HND."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        self.buffers = [
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        ]
        assert use_cuda_graph == all(buffer is not None for buffer in self.buffers)
        self.in_graph = use_cuda_graph
        self.plans = 0
        self.mask: Tensor | None = None

    @unseen
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(tensor.dtype == torch.int32 for tensor in given)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size
        if self.in_graph:
            assert custom_mask is None  # no buffer was given for it
            for buffer, tensor, exact in zip(self.buffers, given, (1, 1, 0, 1), strict=True):
                assert buffer is not None
                assert len(tensor) == len(buffer) if exact else len(tensor) <= len(buffer)
                buffer[: len(tensor)].copy_(tensor, non_blocking=True)
            given = [buffer for buffer in self.buffers if buffer is not None]
        assert self.plans == 0 or self.mask is not None or custom_mask is None
        self.tables = given
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.page_size, self.causal, self.mask = page_size, causal, custom_mask
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.window, self.cap, self.dtype = window_left, logits_soft_cap, q_data_type
        self.plans += 1

    @unseen
    def run(self, q: Tensor, paged_kv_cache: Any, *, return_lse: bool = False) -> Any:
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert keys.stride(-1) == values.stride(-1) == 1
        assert keys.stride() == values.stride()
        assert (q.shape[1], keys.shape[1], q.shape[2]) == self.heads
        assert keys.shape[2] == self.page_size
        assert q.dtype == self.dtype
        ends, page_ends, pages, last = (tensor.tolist() for tensor in self.tables)
        assert q.shape[0] == ends[-1]
        output = torch.full((*q.shape[:2], values.shape[3]), float("nan"), dtype=q.dtype)
        lse = torch.full(q.shape[:2], float("nan"))
        offset = 0
        for i in range(len(last)):
            own_pages = pages[page_ends[i] : page_ends[i + 1]]
            length = (len(own_pages) - 1) * self.page_size + last[i]
            rows = ends[i + 1] - ends[i]
            seen = self._seen(rows, length, offset)
            offset += rows * length
            if rows:
                part = slice(ends[i], ends[i + 1])
                key, value = (
                    torch.cat([plane[page] for page in own_pages], dim=1)[:, :length]
                    for plane in (keys, values)
                )
                output[part], lse[part] = self._attend(q[part], key, value, seen)
        return (output, lse) if return_lse else output

    def _seen(self, rows: int, length: int, offset: int) -> Tensor:
        """`custom_mask` overrides `causal`; both end at the last key; the window is inclusive."""
        own = torch.arange(rows)[:, None] + length - rows
        keys = torch.arange(length)[None]
        if self.mask is not None:
            seen = self.mask[offset : offset + rows * length].view(rows, length)
        elif self.causal:
            seen = keys <= own
        else:
            seen = torch.ones(rows, length, dtype=torch.bool)
        return seen & (own - keys <= self.window) if self.window >= 0 else seen

    def _attend(self, q: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // key.shape[0]
        key, value = (t.repeat_interleave(groups, dim=0) for t in (key, value))
        scores = torch.einsum("rhd,hkd->rhk", q.float(), key.float()) * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        output = torch.einsum("rhk,hkd->rhd", scores.softmax(-1), value.float())
        return output.to(q.dtype), scores.logsumexp(-1) / math.log(2)
