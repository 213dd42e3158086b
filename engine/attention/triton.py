"""Our own kernel for decoding and verification (`engine.attention.triton_kernels`), on GPUs that
FlashInfer does not serve. Spans of more rows, which are prompts, go to another backend.

What a forward needs on the device, slots, masks and page tables, is one int32 tensor, written on
the host and copied at once. Pages of a span are listed once, so a graph's tensors have the size of
the pool and not of the pool times the rows. Trees are data like everything else: a graph takes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import (
    FP8,
    AttentionBackend,
    KVPlane,
    PagedAttention,
    PreparedAttention,
    Span,
    StagedAttention,
    Variation,
    scrap_span,
)
from engine.attention.spans import written_slots
from engine.attention.triton_kernels import PIECE_ROWS, Splitting, Tables, attend

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

    def stage(self, plane: KVPlane, rows: int) -> TritonStaged:
        """For graphs: `fill` before every replay."""
        return TritonStaged(self, plane, rows)


class TritonForward(PagedAttention):
    """One forward. Long spans that stand together are a forward of the other backend."""

    def __init__(self, backend: TritonBackend, plane: KVPlane, spans: Sequence[Span]) -> None:
        self._backend = backend
        listed = Listed(spans, plane.block_size)
        rows = sum(span.length for span in spans)
        sizes = (rows, len(listed.pieces), len(listed.pages), listed.places)
        self._packed = Packed(*sizes, backend.device)
        self._packed.fill(listed)
        super().__init__(plane, self._packed.slots)
        self._prompts = [
            (members[0].row, sum(span.length for span in members), members)
            for long, found in groupby(spans, _is_long)
            if long and (members := list(found))
        ]
        self._others = [
            backend.prompts.prepare(plane, [replace(s, row=s.row - row) for s in members])
            for row, _, members in self._prompts
        ]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        kind, page = (
            self._plane.stacks[self._plane.where[layer][0]][0].dtype,
            self._plane.block_size,
        )
        keys, values = self._write(layer, key, value)
        kind = query.dtype if kind == FP8 else kind
        _, heads, rows, _ = query.shape
        output = query.new_empty(1, rows, heads, values.shape[2])
        tables, splitting = self._packed.tables, self._backend.splitting
        attend(output[0], query[0].to(kind), keys, values, tables, page, how, splitting)
        for (row, count, _), other in zip(self._prompts, self._others, strict=True):
            q, k, v = (tensor.narrow(2, row, count) for tensor in (query, key, value))
            output.narrow(1, row, count).copy_(other.run(layer, q, k, v, how))
        return output


class TritonStaged(TritonForward, StagedAttention):
    """Tensors that stay where they are, for a captured graph of `rows` rows."""

    def __init__(self, backend: TritonBackend, plane: KVPlane, rows: int) -> None:
        pages: int = plane.stacks[0][0].shape[2] // plane.block_size
        self.rows, self._scrap = rows, pages - 1
        self._most_pages = 2 * pages + rows  # shared pages count once for each sequence
        self._backend, self._prompts, self._others = backend, [], []
        self._packed = Packed(rows, rows, self._most_pages, rows, backend.device)
        PagedAttention.__init__(self, plane, self._packed.slots)
        self.fill([scrap_span(0, rows, self._scrap, plane.block_size)])

    def suits(self, spans: Sequence[Span]) -> bool:
        """Filling is long only where a graph has many rows more than the call."""
        pages = sum(len(span.blocks) for span in spans)
        long = any(_is_long(span) and span.blocks[0] != self._scrap for span in spans)
        return pages <= self._most_pages and not long

    def fill(self, spans: Sequence[Span]) -> None:
        """These spans, `rows` rows in all."""
        listed = Listed(spans, self._plane.block_size, all_rows=True)
        assert len(listed.rows) == self.rows
        self._packed.fill(listed)


def _is_long(span: Span) -> bool:
    return span.length > MOST_ROWS


class Listed:
    """Spans as the kernel reads them, on the host: `slots` int64 `[rows]`; `rows`, `pieces` and
    `pages` as its tables, and how many `places` the rows have. Long spans have slots alone, unless
    `all_rows` are the kernel's, which then have no tree of more than 64 nodes."""

    def __init__(self, spans: Sequence[Span], size: int, *, all_rows: bool = False) -> None:
        self.slots = written_slots(spans, size).numpy()
        self.rows: list[tuple[int, int, int]] = []  # position, place, bits
        self.pieces: list[tuple[int, ...]] = []
        self.pages: list[int] = []
        self.places = 0
        for span in spans:
            if _is_long(span) and not all_rows:
                self.rows += [(0, -1, 0)] * span.length
                continue
            self._add_rows(span)
            self._add_pieces(span)
            self.pages += span.blocks[: -(-span.end // size)]

    def _add_rows(self, span: Span) -> None:
        nodes = span.ancestors or ()
        root, place = span.end - len(nodes), self.places
        for i in range(span.length - len(nodes)):
            bits = (2 << i % PIECE_ROWS) - 1
            self.rows.append((span.start + i, place + i, bits))
        for i, above in enumerate(nodes, place + span.length - len(nodes)):
            bits = 1 << i - (place + span.length - len(nodes)) | sum(1 << node for node in above)
            self.rows.append((root + len(above), i, bits))
        self.places += span.length

    def _add_pieces(self, span: Span) -> None:
        """A piece of a chain is a chain that starts later; pieces of a tree have one root."""
        pages, chain = len(self.pages), span.length - len(span.ancestors or ())
        for at in range(0, chain, PIECE_ROWS):
            count, row, root = min(PIECE_ROWS, chain - at), span.row + at, span.start + at
            self.pieces.append((row, count, root + count, root, row, pages, 0, 0))
        row, root = span.row + chain, span.start + chain
        for at in range(chain, span.length, PIECE_ROWS):
            count = min(PIECE_ROWS, span.length - at)
            self.pieces.append((span.row + at, count, span.end, root, row, pages, 0, 0))


class Packed:
    """Slots, rows, pieces and pages in one int32 tensor on the device, in this order: what varies
    most in size is last, and what is not used of it is not copied."""

    def __init__(
        self, rows: int, pieces: int, pages: int, places: int, device: torch.device
    ) -> None:
        self._rows = 2 * rows + 2 * (rows % 2)  # Triton asks whether a pointer divides by 16
        self._pieces = self._rows + ROW * rows
        self._pages = self._pieces + PIECE * pieces
        self._tensor = torch.empty(self._pages + pages, dtype=torch.int32, device=device)
        self.slots = self._tensor[: 2 * rows].view(torch.int64)
        self.tables = Tables(
            self._tensor[self._rows : self._pieces].view(rows, ROW),
            self._tensor[self._pieces : self._pages].view(pieces, PIECE),
            self._tensor[self._pages :],
            places,
        )

    def fill(self, listed: Listed) -> None:
        """Waits for nothing: each copy has pinned memory of its own, which torch keeps until the
        device has read it."""
        used = self._pages + len(listed.pages)
        assert used <= len(self._tensor)
        pinned = self._tensor.is_cuda
        host = torch.zeros(used, dtype=torch.int32, pin_memory=pinned)
        packed = host.numpy()
        packed[: self.slots.numel() * 2].view(np.int64)[:] = listed.slots
        rows = packed[self._rows : self._pieces].reshape(-1, ROW)
        positions, places, bits = zip(*listed.rows, strict=True)
        rows[:, 0], rows[:, 1] = positions, places
        rows[:, 2:] = np.array(bits, np.uint64)[:, None].view(np.int32)
        pieces = packed[self._pieces : self._pages].reshape(-1, PIECE)
        pieces[: len(listed.pieces)] = listed.pieces
        packed[self._pages :] = listed.pages
        self._tensor[:used].copy_(host, non_blocking=True)
