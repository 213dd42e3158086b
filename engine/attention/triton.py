"""Our own kernel for decoding and verification (`engine.attention.triton_kernels`), on GPUs that
FlashInfer does not serve. Spans of more rows, which are prompts, go to another backend.

What a forward needs on the device, slots, masks and page tables, are parts of one copy. Pages of a
span are listed once, so a graph's tensors have the size of the pool and not of the pool times the
rows. Trees are data like everything else: a graph takes them. Of the steps of a chain only the
slots are told: the kernel counts on from the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import (
    AttentionBackend,
    KVPlane,
    PagedAttention,
    PreparedAttention,
    Span,
    StagedAttention,
    Variation,
)
from engine.attention.packed_copy import PackedCopy
from engine.attention.triton_kernels import PIECE_ROWS, Splitting, Tables, attend

_Ints = npt.NDArray[np.int64]

MOST_ROWS = 64  # of a span, the nodes of a tree among them: bits of a mask
ROW, PIECE = 4, 8  # numbers in a record


class TritonBackend:
    """Prepares forwards on one device, and stages ones of a fixed number of rows for graphs."""

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        prompts: AttentionBackend,
        splitting: Splitting = Splitting(),  # noqa: B008  (immutable)
    ) -> None:
        """`prompts` serves spans of more than `MOST_ROWS` rows."""
        self.device, self.prompts, self.splitting = device, prompts, splitting

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> PreparedAttention:
        if all(_is_long(span) for span in spans):
            return self.prompts.prepare(plane, spans)
        return TritonForward(self, plane, spans)

    def stage(self, plane: KVPlane, rows: int, sent: PackedCopy, steps: int = 1) -> TritonStaged:
        return TritonStaged(self, plane, rows, sent, steps)


class TritonStep(PagedAttention):
    """Rows that are told in `tables`, each so many steps further."""

    def __init__(
        self, backend: TritonBackend, plane: KVPlane, packed: Packed, step: int = 0
    ) -> None:
        super().__init__(plane, packed.slots.there[step])
        self._backend, self._tables = backend, packed.tables(step)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        kind, page = (
            self._plane.stacks[self._plane.where[layer][0]][0].dtype,
            self._plane.block_size,
        )
        keys, values = self._write(layer, key.to(kind), value.to(kind))
        _, heads, rows, _ = query.shape
        output = query.new_empty(1, rows, heads, values.shape[2])
        splitting = self._backend.splitting
        attend(output[0], query[0].to(kind), keys, values, self._tables, page, how, splitting)
        return output


class TritonForward(TritonStep):
    """One forward. Long spans that stand together are a forward of the other backend."""

    def __init__(self, backend: TritonBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        listed, sent = Listed(spans, plane.block_size), PackedCopy(backend.device)
        sizes = (len(listed.rows), len(listed.pieces), len(listed.pages), listed.places)
        packed = Packed(sent, *sizes)
        sent.build()
        packed.fill(listed)
        sent.send()
        super().__init__(backend, plane, packed)
        self._prompts = [
            (members[0].row, sum(span.length for span in members), members)
            for long, found in groupby(spans, _is_long)
            if long and (members := list(found))
        ]
        self._others = [
            backend.prompts.prepare(plane, [s._replace(row=s.row - row) for s in members])
            for row, _, members in self._prompts
        ]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        output = super().run(layer, query, key, value, how)
        for (row, count, _), other in zip(self._prompts, self._others, strict=True):
            q, k, v = (tensor.narrow(2, row, count) for tensor in (query, key, value))
            output.narrow(1, row, count).copy_(other.run(layer, q, k, v, how))
        return output


class TritonStaged(StagedAttention):
    """For graphs of `rows` rows."""

    def __init__(
        self, backend: TritonBackend, plane: KVPlane, rows: int, sent: PackedCopy, steps: int
    ) -> None:
        pages: int = plane.stacks[0][0].shape[2] // plane.block_size
        self._backend, self._plane, self._rows, self._scrap = backend, plane, rows, pages - 1
        self._most_pages = 2 * pages + rows  # shared pages count once for each sequence
        self._packed = Packed(sent, rows, rows, self._most_pages, rows, steps)

    def suits(self, spans: Sequence[Span]) -> bool:
        """Filling is long only where a graph has many rows more than the call."""
        pages = sum([len(span.blocks) for span in spans])
        long = [span for span in spans if span.length > MOST_ROWS]
        return pages <= self._most_pages and all(s.blocks[0] == self._scrap for s in long)

    def fill(self, spans: Sequence[Span]) -> None:
        """These spans, `rows` rows in all."""
        listed = Listed(spans, self._plane.block_size, self._packed.steps, all_rows=True)
        assert len(listed.rows) == self._rows
        self._packed.fill(listed)

    def step(self, number: int) -> TritonStep:
        return TritonStep(self._backend, self._plane, self._packed, number)


def _is_long(span: Span) -> bool:
    return span.length > MOST_ROWS


class Listed:
    """Spans, side by side, as the kernel reads them, on the host: int64 `slots` `[steps, rows]`,
    and int32 `rows`, `pieces` and `pages`, as its tables, and how many `places` the rows have. Long
    spans have slots alone, unless `all_rows` are the kernel's, which then have no tree of more than
    64 nodes."""

    def __init__(
        self, spans: Sequence[Span], size: int, steps: int = 1, *, all_rows: bool = False
    ) -> None:
        lengths, starts, chains, counts = np.array([
            (s.length, s.start, s.length - len(s.ancestors or ()), -(-(s.end + steps - 1) // size))
            for s in spans
        ]).T  # fmt: skip
        first_rows, first_pages = np.cumsum(lengths) - lengths, np.cumsum(counts) - counts
        self.pages = np.fromiter(
            chain.from_iterable([s.blocks[:n] for s, n in zip(spans, counts, strict=True)]),
            np.int32,
            counts.sum(),
        )
        span, at = _numbered(lengths)
        indices = starts[span] + at + np.arange(steps)[:, None]
        pages = self.pages[first_pages[span] + indices // size]
        self.slots = pages.astype(np.int64) * size + indices % size
        served = (lengths <= MOST_ROWS) | all_rows
        mine = served[span]
        self.rows = np.zeros((len(span), ROW), np.int32)
        self.rows[:, 0] = indices[0]
        self.rows[:, 1] = np.where(mine, np.cumsum(mine) - 1, -1)
        self.rows[:, 2] = (2 << at % PIECE_ROWS) - 1
        self.places = int(mine.sum())
        self._list_chains(
            np.where(served, chains, 0), np.stack([first_rows, starts, first_pages], axis=1)
        )
        for number in np.flatnonzero((chains < lengths) & served).tolist():
            self._add_tree(spans[number], int(first_rows[number]), int(first_pages[number]))

    def _list_chains(self, lengths: _Ints, firsts: _Ints) -> None:
        """A piece of a chain is a chain that starts later. `firsts`: row, index and page."""
        span, number = _numbered(-(-lengths // PIECE_ROWS))
        at = number * PIECE_ROWS
        row, root, page = (firsts[span] + at[:, None] * (1, 1, 0)).T
        count = np.minimum(lengths[span] - at, PIECE_ROWS)
        none = np.zeros_like(row)
        pieces = (row, count, root + count, root, row, page, none, none)
        self.pieces = np.stack(pieces, axis=1).astype(np.int32)

    def _add_tree(self, span: Span, row: int, page: int) -> None:
        """Pieces of a tree have one root."""
        nodes = span.ancestors or ()
        row, root, pieces = row + span.length - len(nodes), span.end - len(nodes), []
        bits = [1 << i | sum(1 << node for node in above) for i, above in enumerate(nodes)]
        mine = self.rows[row : row + len(nodes)]
        mine[:, 0] = [root + len(above) for above in nodes]
        mine[:, 2:] = np.array(bits, np.uint64)[:, None].view(np.int32)
        for at in range(0, len(nodes), PIECE_ROWS):
            count = min(PIECE_ROWS, len(nodes) - at)
            pieces.append((row + at, count, span.end, root, row, page, 0, 0))
        self.pieces = np.concatenate([self.pieces, np.array(pieces, np.int32)])


def _numbered(counts: _Ints) -> tuple[_Ints, _Ints]:
    """Of so many things of each, whose each is, and its number among them."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]


class Packed:
    """Slots, rows, pieces and pages as the last parts of a copy."""

    def __init__(
        self, sent: PackedCopy, rows: int, pieces: int, pages: int, places: int, steps: int = 1
    ) -> None:
        self.slots = sent.part(steps, rows, dtype=torch.int64)
        self._parts = sent.part(rows, ROW), sent.part(pieces, PIECE), sent.part(pages)
        self.steps, self._places = steps, places

    def fill(self, listed: Listed) -> None:
        rows, pieces, pages = self._parts
        assert len(listed.pages) <= pages.shape[0]
        self.slots.host[:], rows.host[:] = listed.slots, listed.rows
        pieces.host[: len(listed.pieces)] = listed.pieces
        pieces.host[len(listed.pieces) :, 1] = 0
        pages.used = len(listed.pages)
        pages.host[: pages.used] = listed.pages

    def tables(self, step: int) -> Tables:
        rows, pieces, pages = (part.there for part in self._parts)
        return Tables(rows, pieces, pages, self._places, step)
