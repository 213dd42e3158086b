"""What a kernel over physical pages must know of a forward: whose each row is, which KV index a
page holds for whom, which pages a tile of queries reads. Made on the host, then moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Span
from engine.attention.spans import positions_of, slots_of

TILE = 16  # queries that share a list of pages


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
            slots=torch.from_numpy(
                np.concatenate([slots_of(s, block_size, s.start) for s in spans])
            ),
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
