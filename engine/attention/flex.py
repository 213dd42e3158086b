"""FlexAttention: torch's own compiled attention over the paged KV, for GPUs without FlashInfer.

All rows of a forward are one call. Queries look at the *physical* slots of the plane, nothing is
gathered: a mask function turns a slot into the KV index that it has for the row's sequence, and a
list of blocks per tile of queries says which pages are read at all (Dong et al., arXiv:2412.05496).

On a CPU the same mask runs unfused over a copy of the used pages: for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from engine.attention.interface import KVPlane, Span
from engine.attention.pages import TILE, Pages
from engine.attention.spans import fresh_slots
from engine.errors import ConfigError

SMALLEST_PAGE = 16  # tokens: what a tile of keys holds at least
LARGEST_TILE = 64
VERSIONS = 64  # of the compiled kernel, at most


class FlexBackend:
    """Prepares forwards on one device, and stages ones of a fixed number of rows for graphs."""

    name = "flex"

    def __init__(self, device: torch.device, block_size: int) -> None:
        """Raises ConfigError where a page is no whole number of tiles."""
        self.device = device
        self.fused = device.type == "cuda"
        if self.fused and (block_size % SMALLEST_PAGE or block_size & (block_size - 1)):
            raise ConfigError(
                f"cache.block_size is {block_size}; attention = 'flex' needs 16, 32, 64, 128 or "
                "256 on a GPU"
            )
        self.run: Callable[..., Any] = _fused() if self.fused else _unfused

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> FlexForward:
        pages = Pages.of(spans, _blocks(plane), plane.block_size, compact=not self.fused)
        forward = FlexForward(self, plane, pages.to(self.device))
        forward.silence(spans)
        return forward

    def stage(self, plane: KVPlane, rows: int) -> FlexStaged:
        """For graphs: `fill` before every replay."""
        return FlexStaged(self, plane, rows)


class FlexForward:
    """One forward: where its keys go, and the mask of all its rows."""

    def __init__(self, backend: FlexBackend, plane: KVPlane, pages: Pages) -> None:
        self._backend = backend
        self._plane = plane
        self._where = plane.where
        self._pages = pages
        self._masks: dict[int | None, flex.BlockMask] = {}

    def silence(self, spans: Sequence[Span]) -> None:
        """Zero what a page that is written for the first time holds beyond the span: it shares a
        tile with visible keys, and a weight of zero times a foreign NaN is NaN."""
        size = self._plane.block_size
        slots = [slot for span in spans for slot in fresh_slots(span, size)]
        if slots:
            index = torch.tensor(slots).to(self._backend.device, non_blocking=True)
            for pair in self._plane.stacks:
                for tensor in pair:
                    tensor.index_fill_(2, index, 0)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        stack, index = self._where[layer]
        keys, values = (tensor[index] for tensor in self._plane.stacks[stack])
        keys.index_copy_(1, self._pages.slots, key[0])
        values.index_copy_(1, self._pages.slots, value[0])
        if self._pages.used is not None:
            keys, values = (self._gathered(tensor) for tensor in (keys, values))
            values = values.nan_to_num()  # unfused, every row meets every value
        output, aux = self._backend.run(
            query,
            keys[None],
            values[None],
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=self._mask(window),
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[0],
            return_aux=flex.AuxRequest(lse=sinks is not None),
            kernel_options=self._options(),
        )
        if sinks is not None:  # one more column of the softmax, which adds nothing
            output = output * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(output.dtype)
        rows: Tensor = output.to(query.dtype).transpose(1, 2)
        return rows

    def _gathered(self, plane: Tensor) -> Tensor:
        """`[kv_heads, used slots, dim]` of `[kv_heads, slots, dim]`."""
        assert self._pages.used is not None
        heads, _, dim = plane.shape
        blocks = plane.view(heads, -1, self._plane.block_size, dim)
        return blocks.index_select(1, self._pages.used).flatten(1, 2)

    def _mask(self, window: int | None) -> flex.BlockMask:
        mask = self._masks.get(window)
        if mask is None:
            pages, size = self._pages, self._plane.block_size
            mask = self._masks[window] = flex.BlockMask.from_kv_blocks(
                pages.num_listed,
                pages.listed,
                BLOCK_SIZE=(TILE, size),
                mask_mod=pages.mask_mod(size, window),
                seq_lengths=(pages.num_rows, pages.listed.shape[-1] * size),
                compute_q_blocks=False,
            )
        return mask

    def _options(self) -> dict[str, Any] | None:
        if not self._backend.fused:
            return None
        width = min(self._plane.block_size, LARGEST_TILE)
        return {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": TILE, "BLOCK_N": width}


class FlexStaged(FlexForward):
    """Tensors that stay where they are, for a captured graph of `rows` rows."""

    def __init__(self, backend: FlexBackend, plane: KVPlane, rows: int) -> None:
        self.rows = rows
        blocks = _blocks(plane)
        first = [Span(0, rows, 0, [blocks - 1] * -(-rows // plane.block_size))]
        pages = Pages.of(first, blocks, plane.block_size, spans_at_most=rows + 1)
        super().__init__(backend, plane, pages.to(backend.device))

    def suits(self, spans: Sequence[Span]) -> bool:
        return not any(span.ancestors for span in spans)

    def fill(self, spans: Sequence[Span]) -> None:
        """These spans, `rows` rows in all."""
        blocks, size = _blocks(self._plane), self._plane.block_size
        fresh = Pages.of(spans, blocks, size, spans_at_most=self.rows + 1)
        assert fresh.num_rows == self.rows
        self.silence(spans)
        self._pages.take(fresh)


def _blocks(plane: KVPlane) -> int:
    slots: int = plane.stacks[0][0].shape[2]
    return slots // plane.block_size


def _capped(softcap: float) -> Callable[..., Tensor]:
    """Gemma 2 (arXiv:2408.00118)."""

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return cap


def _fused() -> Callable[..., Any]:
    """Compiled for sizes that change; windows, soft caps and trees are further versions."""
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, VERSIONS)
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=True)


def _unfused(*arguments: Any, **named: Any) -> Any:
    """Under the library's own switch for running a mask as it is written."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        return flex.flex_attention(*arguments, **named)
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
