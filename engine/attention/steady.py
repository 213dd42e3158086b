"""Attention in which a row's bits depend on its query and on the keys that it sees, and on nothing
else: our kernel (`engine.attention.triton_kernels`) for prompts too, which other backends add up by
tiles of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.attention.interface import KVPlane, PreparedAttention, Span
from engine.attention.triton import MOST_ROWS, TritonBackend


class SteadyBackend(TritonBackend):
    """Spans that are long for the kernel are several: every key is written before any is read."""

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> PreparedAttention:
        return super().prepare(plane, [part for span in spans for part in _parts(span)])


def _parts(span: Span) -> Iterator[Span]:
    """A tree is whole, and has no more nodes than the kernel takes."""
    row, start, left, nodes = span.row, span.start, span.length, len(span.ancestors or ())
    while left > MOST_ROWS and left > nodes:
        count = min(MOST_ROWS, left - nodes)
        yield Span(row, count, start, span.blocks)
        row, start, left = row + count, start + count, left - count
    yield Span(row, left, start, span.blocks, span.ancestors)
