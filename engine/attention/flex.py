"""FlexAttention: torch's own compiled attention over the paged KV, for GPUs without FlashInfer.

All rows of a forward are one call. Queries look at the *physical* slots of the plane, nothing is
gathered: a mask function turns a slot into the KV index that it has for the row's sequence, and a
list of blocks per tile of queries says which pages are read at all (Dong et al., arXiv:2412.05496).

On a CPU the same mask runs unfused over a copy of the used pages: for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from engine.attention.interface import (
    KVPlane,
    PagedAttention,
    Span,
    StagedForward,
    StepTables,
    Variation,
)
from engine.attention.spans import fresh_slots, positions_of, written_slots
from engine.errors import ConfigError

TILE = 16  # queries that share a list of pages
SMALLEST_PAGE = 16  # tokens: what a tile of keys holds at least
LARGEST_TILE = 64
VERSIONS = 64  # of the compiled kernel, at most


class FlexBackend(StepTables):
    """Prepares forwards on one device, and stages ones of a fixed number of rows for graphs."""

    name = "flex"

    def __init__(self, device: torch.device, block_size: int) -> None:
        """Raises ConfigError where a page is no whole number of tiles."""
        super().__init__()
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
        forward.clear_fresh(spans)
        return forward

    def stage_forward(self, plane: KVPlane, rows: int) -> FlexStaged:
        return FlexStaged(self, plane, rows)


class FlexForward(PagedAttention):
    """One forward: where its keys go, and the mask of all its rows."""

    def __init__(self, backend: FlexBackend, plane: KVPlane, pages: Pages) -> None:
        super().__init__(plane, pages.slots)
        self._backend = backend
        self._pages = pages
        self._masks: dict[int | None, flex.BlockMask] = {}

    def clear_fresh(self, spans: Sequence[Span]) -> None:
        """Zero what a page that is written for the first time holds beyond the span: it shares a
        tile with visible keys, and a weight of zero times a foreign NaN is NaN."""
        size = self._plane.block_size
        slots = [slot for span in spans for slot in fresh_slots(span, size)]
        if slots:
            index = torch.tensor(slots).to(self._backend.device, non_blocking=True)
            for pair in self._plane.stacks:
                for tensor in pair:
                    tensor.index_fill_(2, index, 0)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        keys, values = self._write(layer, key, value)
        softcap, sinks = how.softcap, how.sinks
        if self._pages.used is not None:
            keys, values = (self._gathered(tensor) for tensor in (keys, values))
            values = values.nan_to_num()  # unfused, every row meets every value
        output, aux = self._backend.run(
            query,
            keys[None],
            values[None],
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=self._mask(how.window),
            scale=how.scaling,
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


class FlexStaged(FlexForward, StagedForward):
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
        self.clear_fresh(spans)
        self._pages.take(fresh)


@dataclass(frozen=True, slots=True)
class Pages:
    """`[rows]` by row: `slots` (int64, where its key goes), `owners` (number of its span),
    `indices` (its own KV index), `positions`, `roots` (KV index of the first tree node; far away
    in a chain). `logical` `[spans, pages]`: which block of the span a page is, or -1.
    `branches` `[rows, nodes]`: which nodes a row sees; `depths` `[spans, nodes]`. `num_listed`
    `[1, 1, tiles]` and `listed` `[1, 1, tiles, pages]`: the pages that a tile reads. `used`: the
    pages of this forward if they are numbered anew, else None."""

    slots: Tensor
    owners: Tensor
    indices: Tensor
    positions: Tensor
    roots: Tensor
    logical: Tensor
    branches: Tensor
    depths: Tensor
    num_listed: Tensor
    listed: Tensor
    used: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        num_pages: int,
        block_size: int,
        *,
        compact: bool = False,
        spans_at_most: int = 0,
    ) -> Pages:
        """With `compact`, only used pages are counted. `spans_at_most`: rows of `logical`."""
        tables = [np.asarray(s.blocks[: -(-s.end // block_size)], np.int64) for s in spans]
        used = None
        if compact:
            used, anew = np.unique(np.concatenate(tables), return_inverse=True)
            num_pages = len(used)
            tables = np.split(anew, np.cumsum([len(t) for t in tables])[:-1])
        logical = np.full((max(len(spans), spans_at_most), num_pages), -1, np.int32)
        for row, table in zip(logical, tables, strict=False):
            row[table[::-1]] = np.arange(len(table))[::-1]  # of a repeated page, the first counts
        lengths = [span.length for span in spans]
        owners = np.repeat(np.arange(len(spans)), lengths)
        num_listed, listed = _listed(owners, tables, num_pages)
        return cls(
            slots=written_slots(spans, block_size),
            owners=_int32(owners),
            indices=_int32(np.concatenate([np.arange(s.start, s.end) for s in spans])),
            positions=_int32(np.concatenate([positions_of(s)[0] for s in spans])),
            roots=_int32(np.repeat([_root(s) for s in spans], lengths)),
            logical=torch.from_numpy(logical),
            **_trees(spans),
            num_listed=num_listed,
            listed=listed,
            used=None if used is None else torch.from_numpy(used),
        )

    def to(self, device: torch.device) -> Pages:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        there = {k: v.to(device, non_blocking=True) for k, v in moved.items() if v is not None}
        return replace(self, **there)

    def take(self, other: Pages) -> None:
        """The numbers of `other`, which has the same shapes, into these tensors."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None and mine.numel():  # chains have no nodes
                mine.copy_(theirs, non_blocking=True)

    def mask_mod(self, block_size: int, window: int | None) -> Callable[..., Tensor]:
        """Whether row `q` sees the slot `kv`, as FlexAttention asks."""
        owners, indices, positions = self.owners, self.indices, self.positions
        logical, roots, branches, depths = self.logical, self.roots, self.branches, self.depths
        nodes = branches.shape[1]

        def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            owner = owners[q]
            block = logical[owner, kv // block_size]
            index = block * block_size + kv % block_size
            visible = index <= indices[q]
            position = index
            if nodes:
                node = index - roots[q]
                inside = (node >= 0) & (node < nodes)
                node = torch.where(inside, node, 0)
                visible = torch.where(inside, branches[q, node], visible)
                position = torch.where(inside, roots[q] + depths[owner, node], index)
            if window is not None:
                visible = visible & (positions[q] - position < window)
            return visible & (block >= 0)

        return seen


def _root(span: Span) -> int:
    return span.end - len(span.ancestors) if span.ancestors else np.iinfo(np.int32).max // 2


def _trees(spans: Sequence[Span]) -> dict[str, Tensor]:
    nodes = max(len(span.ancestors or ()) for span in spans)
    branches = np.zeros((sum(span.length for span in spans), nodes), bool)
    depths = np.zeros((len(spans), nodes), np.int32)
    for number, span in enumerate(spans):
        for node, above in enumerate(span.ancestors or ()):
            row = span.row - spans[0].row + span.length - len(span.ancestors or ()) + node
            branches[row, [*above, node]] = True
            depths[number, node] = len(above)
    return {"branches": torch.from_numpy(branches), "depths": torch.from_numpy(depths)}


def _listed(
    owners: np.ndarray, tables: Sequence[np.ndarray], num_pages: int
) -> tuple[Tensor, Tensor]:
    """Per tile of rows, the pages of the sequences in it."""
    tiles = -(-len(owners) // TILE)
    counts = np.zeros((1, 1, tiles), np.int32)
    listed = np.zeros((1, 1, tiles, num_pages), np.int32)
    for tile in range(tiles):
        members = np.unique(owners[tile * TILE : (tile + 1) * TILE])
        pages = np.unique(np.concatenate([tables[i] for i in members]))
        counts[0, 0, tile] = len(pages)
        listed[0, 0, tile, : len(pages)] = pages
    return torch.from_numpy(counts), torch.from_numpy(listed)


def _int32(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))


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
    settings.specialize_float = True  # a soft cap as an input of the kernel is not compiled
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
