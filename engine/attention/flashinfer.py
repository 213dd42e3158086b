"""FlashInfer (Ye et al., arXiv:2501.01005): plan once per forward, run once per layer, over pages.

Uses `BatchPrefillWithPagedKVCacheWrapper` as documented in 0.7: query lengths vary, a chain is
causal from the end, a tree has a custom mask. The plane's `[kv_heads, slots, dim]` is viewed as
"HND" pages without a copy. The wrapper's class is an argument, so that tests can check this adapter
against the documented behaviour without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import (
    KVPlane,
    PagedAttention,
    PreparedAttention,
    Span,
    StagedAttention,
    Variation,
    padding_span,
)
from engine.attention.packed_copy import PackedCopy
from engine.attention.spans import visible, written_slots

WORKSPACE = 128 << 20  # bytes, as the library recommends

Wrapper = Any  # the package has no types
MakeWrapper = Callable[..., Wrapper]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a plan depends on besides the spans. Layers with equal values share a plan. `masked`:
    the spans contain a tree; a wrapper chooses its kernel in its first plan, for good, and on
    compute capability 9.0 that for chains accepts no mask."""

    heads: int
    kv_heads: int
    dim: int
    scaling: float | None
    window: int | None
    softcap: float | None
    dtype: torch.dtype
    masked: bool


class FlashInferBackend:
    """Prepares forwards on one device, and stages forwards of a fixed number of rows for graphs.
    The library copies its own tables. All chains of one model and row count share tensors, since
    the host waits for the device between them; a forward, which may overlap, has its own."""

    name = "flashinfer"

    def __init__(self, device: torch.device, make_wrapper: MakeWrapper) -> None:
        self.device = device
        self.make_wrapper = make_wrapper
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self.wrappers: dict[Variant, Wrapper] = {}
        self._staged: dict[tuple[KVPlane, int], list[FlashInferGraph]] = {}
        event: Any = torch.cuda.Event
        self.read = event() if device.type == "cuda" else None  # recorded behind a forward's plans

    def wait(self) -> None:
        """Wait until the device has read the last plans: a wrapper has one page-locked buffer."""
        if self.read is not None and not self.read.query():
            self.read.synchronize()

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> FlashInferForward:
        return FlashInferForward(self, plane, spans)

    def stage(
        self, plane: KVPlane, rows: int, sent: PackedCopy, steps: int | None = None
    ) -> FlashInferStaged:
        if steps is None:
            return FlashInferStaged(self, [FlashInferGraph(self, plane, rows)])
        made = self._staged.setdefault((plane, rows), [])
        made += [FlashInferGraph(self, plane, rows) for _ in range(len(made), steps)]
        return FlashInferStaged(self, made[:steps])


class FlashInferForward(PagedAttention):
    """One forward; a variant is planned when its first layer runs."""

    def __init__(self, backend: FlashInferBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        self._backend = backend
        backend.wait()
        self._table = self._table_of(spans, plane.block_size)
        super().__init__(plane, self._table.slots.to(backend.device, non_blocking=True))
        self._planned: dict[Variant, Wrapper] = {}

    def _table_of(self, spans: Sequence[Span], size: int) -> Table:
        return Table.of(spans, size, self._backend.device)

    def _wrapper(self, variant: Variant) -> Wrapper:
        wrapper = self._planned.get(variant)
        if wrapper is None:
            wrapper = self._planned[variant] = self._made(variant)
            self._table.plan(wrapper, variant, self._plane.block_size, self._backend.device)
            if self._backend.read is not None:
                self._backend.read.record()
        return wrapper

    def _made(self, variant: Variant) -> Wrapper:
        """Return a variant's wrapper; cached, since each has several megabytes of buffers."""
        backend, wrappers = self._backend, self._backend.wrappers
        if variant not in wrappers:
            wrappers[variant] = backend.make_wrapper(backend.workspace, "HND")
        return wrappers[variant]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        keys, values = self._write(layer, key, value)
        heads, dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
        kind = query.dtype, self._table.masked
        wrapper = self._wrapper(
            Variant(heads, kv_heads, dim, how.scaling, how.window, how.softcap, *kind)
        )
        rows = query[0].transpose(0, 1).contiguous()
        size = self._plane.block_size
        pages = tuple(
            t.view(t.shape[0], -1, size, t.shape[2]).transpose(0, 1) for t in (keys, values)
        )
        if how.sinks is None:
            output: Tensor = wrapper.run(rows, pages)
            return output[None]
        output, lse = wrapper.run(rows, pages, return_lse=True)  # log2
        share = torch.sigmoid(lse * log(2) - how.sinks.float())  # weight of all keys but the sink
        return (output * share[..., None].to(output.dtype))[None]


class FlashInferGraph(FlashInferForward):
    """Wrappers in graph mode, with buffers at fixed addresses and the variants of the warm-up
    forward before the capture. No trees: one with a buffer for masks masks every step."""

    def __init__(self, backend: FlashInferBackend, plane: KVPlane, rows: int) -> None:
        pages: int = plane.stacks[0][0].shape[2] // plane.block_size
        self.rows = rows
        self._padding_block = pages - 1
        self._most_pages = 2 * pages + rows  # shared pages count once for each sequence
        super().__init__(backend, plane, [padding_span(0, rows, pages - 1, plane.block_size)])

    def _made(self, variant: Variant) -> Wrapper:
        count, device = self.rows + 1, self._backend.device
        sizes = (count + 1, count + 1, self._most_pages, count)
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        buffers = {
            f"{name}_buf": torch.zeros(size, dtype=torch.int32, device=device)
            for name, size in zip(names, sizes, strict=True)
        }
        return self._backend.make_wrapper(
            self._backend.workspace, "HND", use_cuda_graph=True, **buffers
        )

    def _table_of(self, spans: Sequence[Span], size: int) -> Table:
        more = self.rows + 1 - len(spans)
        return Table.of(spans, size, self._backend.device, more, self._padding_block)

    def suits(self, spans: Sequence[Span]) -> bool:
        pages = sum(len(span.blocks) for span in spans)
        return pages + self.rows <= self._most_pages and not any(s.ancestors for s in spans)

    def fill(self, spans: Sequence[Span]) -> None:
        """Plan these spans, `rows` rows in all."""
        self._table = self._table_of(spans, self._plane.block_size)
        assert len(self._table.slots) == self.rows
        self._slots.copy_(self._table.slots, non_blocking=True)
        for variant, wrapper in self._planned.items():
            self._table.plan(wrapper, variant, self._plane.block_size, self._backend.device)


class FlashInferStaged(StagedAttention):
    """Staged steps, each with its own tensors."""

    def __init__(self, backend: FlashInferBackend, steps: Sequence[FlashInferGraph]) -> None:
        self._backend, self._steps = backend, steps

    def suits(self, spans: Sequence[Span]) -> bool:
        return self._steps[0].suits(spans)

    def fill(self, spans: Sequence[Span]) -> None:
        self._backend.wait()
        for number, step in enumerate(self._steps):
            step.fill([span._replace(start=span.start + number) for span in spans])
        if self._backend.read is not None:
            self._backend.read.record()

    def step(self, number: int) -> PreparedAttention:
        return self._steps[number]


@dataclass(frozen=True, slots=True)
class Table:
    """Spans in the library's form, on the host, pinned for a GPU: int32 `query_ends` and
    `page_ends` `[spans + 1]`, `pages`, and `last`, the tokens in each span's last page."""

    spans: Sequence[Span]
    masked: bool  # as in Variant
    slots: Tensor
    query_ends: Tensor
    page_ends: Tensor
    last: Tensor
    pages: Tensor

    @classmethod
    def of(
        cls, spans: Sequence[Span], size: int, device: torch.device, more: int = 0, padding: int = 0
    ) -> Table:
        """For pages of `size` slots; pads with `more` sequences without rows, in page `padding`."""
        counts = [-(-span.end // size) for span in spans]
        rows = [span.length for span in spans] + [0] * more
        last = [(span.end - 1) % size + 1 for span in spans] + [1] * more
        pages = [page for s, count in zip(spans, counts, strict=True) for page in s.blocks[:count]]
        ends = [*accumulate(rows, initial=0), *accumulate(counts + [1] * more, initial=0)]
        numbers = torch.tensor([*ends, *last, *pages, *[padding] * more], dtype=torch.int32)
        slots = written_slots(spans, size)
        if device.type == "cuda":
            numbers, slots = numbers.pin_memory(), slots.pin_memory()
        each = len(last)
        parts = torch.split(numbers, [each + 1, each + 1, each, len(numbers) - 3 * each - 2])
        return cls(spans, any(span.ancestors for span in spans), slots, *parts)

    def plan(self, wrapper: Wrapper, variant: Variant, size: int, device: torch.device) -> None:
        """Plan a wrapper. Tables that the library reads on the host are host tensors, so nothing
        waits for the device but the packing of a mask, whose length the library reads back."""
        mask, window = None, variant.window
        if variant.masked:  # the mask then includes the window
            seen = [visible(span, window).reshape(-1) for span in self.spans]
            mask, window = torch.from_numpy(np.concatenate(seen)), None
            mask = mask.pin_memory() if device.type == "cuda" else mask
            mask = mask.to(device, non_blocking=True)
        wrapper.plan(
            self.query_ends, self.page_ends, self.pages.to(device, non_blocking=True), self.last,
            variant.heads, variant.kv_heads, variant.dim, size,
            custom_mask=mask, causal=mask is None, sm_scale=variant.scaling,
            window_left=-1 if window is None else window - 1, logits_soft_cap=variant.softcap,
            q_data_type=variant.dtype, kv_data_type=variant.dtype,
        )  # fmt: skip
