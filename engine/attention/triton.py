"""Our own kernel (`engine.attention.triton_kernels`), the first choice on a GPU.

Slots, masks and page tables of a forward are parts of one copy. A span's pages are listed once, so
a graph's tensors have the size of the pool, not of the pool times the rows. Prompts, trees and
chains differ only in this data, so one graph serves them all. A chain's later steps need only their
slots: the kernel counts positions from the first step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import (
    FP8,
    KVPlane,
    PagedAttention,
    Span,
    StagedAttention,
    Variation,
)
from engine.attention.packed_copy import PackedCopy
from engine.attention.triton_kernels import PATH, PIECE, ROW, Splitting, Tables, attend

MOST_NODES = PATH.value  # of a tree: one bit of a mask each
_CHAIN = np.arange(MOST_NODES, dtype=np.int32)[None]  # its path
DECODES = Splitting()
# Outside graphs, where a span has `LONG` rows: its pieces are programs enough without split keys.
PROMPTS, LONG = Splitting(splits=1, rows=16), 256


class TritonBackend:
    """Prepares forwards on one device, and stages those of a fixed number of rows for graphs.
    `prompts`: the splitting of prepared forwards with a long span. If it equals `splitting`, rows
    are batch-invariant, those of trees by their paths."""

    name = "triton"

    def __init__(
        self, device: torch.device, splitting: Splitting = DECODES, prompts: Splitting = PROMPTS
    ) -> None:
        self.device, self.splitting, self.prompts = device, splitting, prompts
        self.by_path = prompts == splitting

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> TritonStep:
        long = any(span.length >= LONG for span in spans)
        splitting = self.prompts if long else self.splitting
        tables = HostTables(spans, plane.block_size, 1, splitting.rows, by_path=self.by_path)
        sent, sizes = PackedCopy(self.device), (tables.rows, tables.pieces, tables.pages)
        buffers = Buffers(sent, *map(len, sizes), by_path=self.by_path)
        sent.build()
        buffers.fill(tables)
        sent.send()
        return TritonStep(splitting, plane, buffers, 0)

    def stage(
        self, plane: KVPlane, rows: int, sent: PackedCopy, steps: int | None = None
    ) -> TritonStaged:
        return TritonStaged(self, plane, rows, sent, steps or 1)


class TritonStep(PagedAttention):
    """Attention of the rows in `packed`, all advanced by `step` positions."""

    def __init__(self, splitting: Splitting, plane: KVPlane, buffers: Buffers, step: int) -> None:
        super().__init__(plane, buffers.slots.tensor[step])
        self._splitting, self._tables = splitting, buffers.tables(step)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        keys, values = self._write(layer, key, value)
        kind, page = query.dtype if keys.dtype == FP8 else keys.dtype, self._plane.block_size
        _, heads, rows, _ = query.shape
        output = query.new_empty(1, rows, heads, values.shape[2])
        attend(output[0], query[0].to(kind), keys, values, self._tables, page, how, self._splitting)
        return output


class TritonStaged(StagedAttention):
    """Staged attention of `rows` rows, for graphs."""

    def __init__(
        self, backend: TritonBackend, plane: KVPlane, rows: int, sent: PackedCopy, steps: int
    ) -> None:
        pages: int = plane.stacks[0][0].shape[2] // plane.block_size
        self._splitting, self._plane, self._rows = backend.splitting, plane, rows
        self._most_pages = 2 * pages + rows  # shared pages count once for each sequence
        self._buffers = Buffers(sent, rows, rows, self._most_pages, steps, by_path=backend.by_path)

    def suits(self, spans: Sequence[Span]) -> bool:
        return sum([len(span.blocks) for span in spans]) <= self._most_pages

    def fill(self, spans: Sequence[Span]) -> None:
        """Set the spans, `rows` rows in all."""
        size, rows, buffers = self._plane.block_size, self._splitting.rows, self._buffers
        tables = HostTables(spans, size, buffers.steps, rows, by_path=buffers.by_path)
        assert len(tables.rows) == self._rows
        buffers.fill(tables)

    def step(self, number: int) -> TritonStep:
        return TritonStep(self._splitting, self._plane, self._buffers, number)


class HostTables:
    """Spans, concatenated in the kernel's form on the host: int64 `slots` `[steps, rows]`, and
    int32 `rows`, `pieces` of up to `rows` rows, `pages` and, if `by_path`, `paths`, see
    `triton_kernels`. Trees have at most 64 nodes."""

    def __init__(
        self, spans: Sequence[Span], size: int, steps: int = 1, rows: int = DECODES.rows,
        *, by_path: bool = False,
    ) -> None:  # fmt: skip
        pieces, tables, page, more = list[int](), list["array[int]"](), 0, steps + size - 2
        for span in spans:
            row, length, start, blocks, nodes = span
            count = (start + length + more) // size
            table = blocks[:count]
            tables.append(table if isinstance(table, array) else array("i", table))
            if length <= rows and not nodes:
                pieces += (row, length, start + length, start, row, page)
            else:
                pieces += _pieces(span, page, rows, by_path=by_path)
            page += count
        self.pages = np.frombuffer(b"".join(tables), np.int32)
        self.pieces = np.array(pieces, np.int32).reshape(-1, PIECE.value)
        self._list_rows(size, steps)
        self.paths = _CHAIN.repeat(len(self.rows) * by_path, axis=0)
        for span in spans:
            if span.ancestors:
                self._place_nodes(span.row + span.length, span.end, span.ancestors)

    def _list_rows(self, size: int, steps: int) -> None:
        """Set rows and slots as if all spans were chains."""
        of = self.pieces.repeat(self.pieces[:, 1], axis=0).T
        numbers = np.arange(of.shape[1], dtype=np.int32)
        after = numbers - of[4]
        indices = of[3] + after
        block, place = np.divmod(indices + np.arange(steps, dtype=np.int32)[:, None], size)
        self.slots = self.pages[of[5] + block].astype(np.int64) * size + place
        self.rows = np.zeros((len(numbers), ROW.value), np.int32)
        self.rows[:, 0], self.rows[:, 1] = indices, (2 << after) - 1

    def _place_nodes(self, row: int, end: int, nodes: Sequence[Sequence[int]]) -> None:
        """Correct the rows of a tree that ends just before this row and this KV index."""
        assert len(nodes) <= MOST_NODES
        bits = [1 << i | sum(1 << node for node in above) for i, above in enumerate(nodes)]
        rows = self.rows[row - len(nodes) : row]
        rows[:, 0] = [end - len(nodes) + len(above) for above in nodes]
        rows[:, 1:] = np.array(bits, np.uint64)[:, None].view(np.int32)
        for i, path in enumerate(self.paths[row - len(nodes) : row]):
            path[: len(nodes[i]) + 1] = *nodes[i], i


def _pieces(span: Span, page: int, rows: int, *, by_path: bool) -> list[int]:
    """The numbers of a span's pieces: a chain's are chains, and those of a tree share a root. If
    `by_path`, a node's is a row that ends where a chain of its path would."""
    row, length, start, _, ancestors = span
    nodes, each, pieces = ancestors or (), 1 if by_path else rows, list[int]()
    chain = length - len(nodes)
    for at in range(0, chain, rows):
        count, root = min(rows, chain - at), start + at
        pieces += (row + at, count, root + count, root, row + at, page)
    for at in range(chain, length, each):
        end = start + chain + len(nodes[at - chain]) + 1 if by_path else span.end
        pieces += (row + at, min(each, length - at), end, start + chain, row + chain, page)
    return pieces


class Buffers:
    """Slots, rows, pieces, paths and pages as the last buffers of a PackedCopy."""

    def __init__(
        self, sent: PackedCopy, rows: int, pieces: int, pages: int, steps: int = 1, *, by_path: bool
    ) -> None:
        self.slots = sent.reserve(steps, rows, dtype=torch.int64)
        self._rows, self._pieces = sent.reserve(rows, ROW.value), sent.reserve(pieces, PIECE.value)
        self._paths = sent.reserve(rows * by_path, MOST_NODES)
        self._pages = sent.reserve(pages)
        self.steps, self.by_path = steps, by_path

    def fill(self, tables: HostTables) -> None:
        rows, pieces, pages = self._rows, self._pieces, self._pages
        assert len(tables.pages) <= pages.shape[0]
        self.slots.host[:], rows.host[:] = tables.slots, tables.rows
        pieces.host[: len(tables.pieces)] = tables.pieces
        pieces.host[len(tables.pieces) :, 1] = 0
        self._paths.host[:] = tables.paths
        pages.used = len(tables.pages)
        pages.host[: pages.used] = tables.pages

    def tables(self, step: int) -> Tables:
        rows, pieces = self._rows.tensor, self._pieces.tensor
        return Tables(rows, pieces, self._pages.tensor, self._paths.tensor, step)
