"""Compiled attention of a few rows over the paged KV cache, on one thread.

Keys and values are read in place, once for all rows and query heads that share them (grouped-query
attention, arXiv:2305.13245), in tiles that fit the caches, with an online softmax
(arXiv:1805.02867) and float32 sums. Reading a tile's keys prefetches its values, and reading its
values prefetches the next tile's keys: hardware prefetchers cannot follow scattered blocks.

A row's sums run over its own sequence's keys in order, in tiles counted from key 0; a masked key
has weight zero, which changes no bit. So a row's result is bit-identical whatever rows and
sequences share the call. A NaN key affects its own sequence only.

Keys and values are float32, or words of two bfloat16, whose sums hold the even columns first. Words
are multiplied as pairs where that is faster (`kernels_products`), else split into floats.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast, fast_in_place
from engine.cpu.kernels_products import BY_PAIRS, keep
from engine.cpu.vectors import FLOATS, HAS_AVX512, INTS, LANES, WIDE, Emit, each_count, pointers

SPAN_ROWS = 64  # bits in a mask
TILE = 16 * LANES  # keys per tile
# Queries and columns whose sums fit in registers beside the values.
GROUP, COLUMNS = (5, 4 * LANES) if HAS_AVX512 else (2, 2 * LANES)
LOWEST = np.float32(-3e38)  # below every score; finite, so that lowest - lowest is 0


@fast_in_place
def attend(
    parts: Any, packed: Any, heads: Any, spans: Any, seen: Any, places: Any, scaling: Any,
    keys: Any, values: Any, buffers: Any, out: Any,
) -> None:  # fmt: skip
    """Write the keys and values of all rows to their slots of `keys` and `values` `[kv_heads,
    slots, words]`, then attend. `packed` float32 `[rows, at least (heads + 2 * kv_heads) * dim]`:
    query, key and value heads; `out` `[rows, heads * dim]`. `spans` `[number, 3]`: first row, rows,
    KV index of the first row. `places`, `buffers`: from `places_of`, `buffers_for`. Bit i of
    `seen[row]`: whether the row sees the key of its span's i-th row; it sees all earlier keys.
    `parts`: a tuple of `words / LANES` zeros, so that each head size has its own code."""
    kv_heads, slots, words = keys.shape
    dim, group = out.shape[1] // heads, heads // kv_heads
    _write(packed, heads, spans, places, dim, keys)
    _write(packed, heads + kv_heads, spans, places, dim, values)
    queries, _, sums, _, totals, _ = buffers
    for span in range(spans.shape[0]):
        first, rows = spans[span, 0], spans[span, 1]
        for head in range(kv_heads):
            for n in range(rows * group):
                at = (head * group + n % group) * dim
                _copy_query(packed, first + n // group, at, dim, keys, queries, n)
            _attend(parts, group, spans, seen, places, span, head, scaling, keys, values, buffers)
            for i in range(rows):
                at = ((first + i) * heads + head * group) * dim
                for j in range(group):
                    _write_output(parts, i * group + j, totals, sums, values, out, at + j * dim)


@fast
def buffers_for(spans: Any, group: Any, dim: Any) -> Any:
    """Return scratch arrays for one KV head: queries, a tile's scores, sums; then per lane the
    largest scores, the sums of weights, and the factors that rescale earlier sums."""
    most = spans[:, 1].max() * group
    return (
        np.empty((most, dim), np.uint32), np.empty((most, TILE), np.float32),
        np.empty((most, dim), np.float32), np.empty((most, LANES), np.float32),
        np.empty((most, LANES), np.float32), np.empty((most, LANES), np.float32),
    )  # fmt: skip


@fast_in_place
def _attend(
    parts: Any, group: Any, spans: Any, seen: Any, places: Any, span: Any, head: Any, scaling: Any,
    keys: Any, values: Any, buffers: Any,
) -> None:  # fmt: skip
    """Compute the sums of weighted values and of weights for all queries of one KV head."""
    queries, scores, sums, peaks, totals, rescales = buffers
    first, rows, start = spans[span, 0], spans[span, 1], spans[span, 2]
    count, end, plane = rows * group, start + rows, keys.shape[1] * keys.shape[2]
    for i in range(count):
        sums[i] = 0
        peaks[i], totals[i] = LOWEST, 0
    for tile in range(0, end, TILE):
        some, at = min(TILE, end - tile), span * places.shape[1] + tile
        chunks = (some + LANES - 1) // LANES
        _score(parts, queries, count, keys, values, head * plane, places, at, chunks, scores)
        if tile + TILE > start:
            for i in range(count):
                _mask_scores(scores, i, seen[first + i // group], tile, start, end)
        _online_softmax(count, scores, chunks, scaling, peaks, totals, rescales)
        after, ahead, then = head, end - tile - TILE, at + TILE
        if ahead <= 0:  # prefetch the next head's or the next span's keys
            after = head + 1 if head + 1 < keys.shape[0] else 0
            later = span if after else min(span + 1, spans.shape[0] - 1)
            ahead, then = spans[later, 1] + spans[later, 2], later * places.shape[1]
        if BY_PAIRS and keys.shape[2] != sums.shape[1]:  # round weights to bfloat16 in place
            for i in range(count):
                words = (some + 2 * LANES - 1) // (2 * LANES) * LANES
                keep(scores, i * TILE, scores, i * TILE, words, values)
        where = head * plane, at, after * plane, then, ahead
        for i in range(0, count, GROUP):
            more = min(GROUP, count - i)
            _add(parts, i, more, scores, rescales, some, values, places, keys, where, sums)


@fast_in_place
def _write(packed: Any, before: Any, spans: Any, places: Any, dim: Any, plane: Any) -> None:
    """Write the heads after the first `before` heads of all rows to their places in `plane`."""
    heads, slots, words = plane.shape
    for span in range(spans.shape[0]):
        for row in range(spans[span, 1]):
            at = (spans[span, 0] + row) * packed.shape[1] + before * dim
            there = places[span, spans[span, 2] + row]
            for head in range(heads):
                keep(packed, at + head * dim, plane, there + head * slots * words, words, plane)


@fast_in_place
def _copy_query(packed: Any, row: Any, at: Any, dim: Any, keys: Any, queries: Any, i: Any) -> None:
    """Copy a query to `queries` in the keys' layout: for words split into floats, the even columns
    before the odd ones."""
    if keys.shape[2] == dim or BY_PAIRS:
        keep(packed, row * packed.shape[1] + at, queries, i * dim, keys.shape[2], keys)
        return
    out, half = queries.view(np.float32), dim // 2
    for j in range(half):
        out[i, j], out[i, half + j] = packed[row, at + 2 * j], packed[row, at + 2 * j + 1]


@fast
def places_of(spans: Any, tables: Any, block_size: Any, words: Any) -> Any:
    """Return each key's offset in a head's plane, `[spans, keys + LANES]`, from `tables` `[spans,
    blocks]`. The last key's offset is repeated as padding."""
    count, most = spans.shape[0], (spans[:, 1] + spans[:, 2]).max()
    out = np.empty((count, most + LANES), np.int64)
    for span in range(count):
        end = spans[span, 1] + spans[span, 2]
        for first in range(0, end, block_size):
            slot = tables[span, first // block_size] * block_size
            for i in range(min(block_size, end - first)):
                out[span, first + i] = (slot + i) * words
        out[span, end : end + LANES] = out[span, end - 1]
    return out


@fast
def flatten(paths: Any, spans: Any, tables: Any, block_size: Any, words: Any, places: Any) -> None:
    """Lay out a tree node's path as consecutive keys of its span in `places`, so that its sums are
    a chain's to the bit. `paths` `[any, 3]`: span, KV index, and the KV index of the key's slot."""
    for i in range(len(paths)):
        span, index, there = paths[i, 0], paths[i, 1], paths[i, 2]
        slot = tables[span, there // block_size] * block_size + there % block_size
        places[span, index] = slot * words
        if index + 1 == spans[span, 1] + spans[span, 2]:
            places[span, index + 1 : index + 1 + LANES] = slot * words


@fast_in_place
def _mask_scores(scores: Any, row: Any, seen: Any, tile: Any, start: Any, end: Any) -> None:
    """Mask the scores of keys that a row may not see, and of padding."""
    for i in range(max(0, start - tile), min(TILE, end + LANES - tile)):
        if tile + i >= end or not (seen >> np.uint64(tile + i - start)) & np.uint64(1):
            scores[row, i] = -np.inf


# Shuffle masks that interleave the lanes of two vectors.
_ALTERNATE = [
    ir.Constant(INTS, [i // 2 + LANES * (i % 2) for i in range(by, by + LANES)])
    for by in (0, LANES)
]


class _Plane:
    """Emits loads of one head's keys or values, float32 or words."""

    def __init__(self, builder: Any, pointer: Any, kind: Any, parts: int) -> None:
        """`parts`: vectors per key in memory."""
        self.words = kind.dtype != types.float32
        self.by_pairs = self.words and BY_PAIRS
        self.emit = Emit(builder, pairs=self.by_pairs)
        self.parts = range(parts)
        self.columns = parts * (2 if self.words else 1)  # float32 vectors per key
        self.pointer = builder.bitcast(pointer, ir.IntType(32).as_pointer())

    def load(self, place: Any, part: int) -> Any:
        return self.emit.load(self.pointer, self.emit.at(place, part * LANES), INTS)

    def key(self, place: Any) -> list[Any]:
        """Return the key at an offset as vectors of float32 or of pairs."""
        read = [self.load(place, part) for part in self.parts]
        if self.by_pairs or not self.words:
            return read
        even, odd = zip(*map(self.emit.halves, read), strict=True)
        return [*even, *odd]

    def values(self, places: list[Any], part: int) -> list[Any]:
        """Return the column vectors of a part: of one value or, as pairs, of two values."""
        read = [self.load(place, part) for place in places]
        if not self.by_pairs:
            return self.emit.halves(read[0]) if self.words else read
        (one, other), b = read, self.emit.builder
        by, low, high = (ir.Constant(INTS, [n] * LANES) for n in (16, 0xFFFF, 0xFFFF0000))
        return [
            b.or_(b.and_(one, low), b.shl(other, by)),
            b.or_(b.lshr(one, by), b.and_(other, high)),
        ]

    def in_order(self, sums: list[Any]) -> list[Any]:
        """Return vectors in column order; for words, sums hold the even columns first."""
        if not self.words:
            return sums
        half, join = len(self.parts), self.emit.builder.shuffle_vector
        pairs = zip(sums[:half], sums[half:], strict=True)
        return [join(*two, mask) for two in pairs for mask in _ALTERNATE]

    def prefetch(self, place: Any) -> None:
        for part in self.parts:
            self.emit.prefetch(self.pointer, self.emit.at(place, part * LANES), near=False)


@intrinsic  # type: ignore[misc]
def _score(
    typing: Any, parts: Any, queries: Any, rows: Any, keys: Any, values: Any, base: Any,
    places: Any, at: Any, chunks: Any, out: Any,
) -> Any:  # fmt: skip
    """Write the dot products of `queries` `[rows, dim]` with 16 * `chunks` keys, at the offsets
    `places[at:]` of the head at `base`, to `out` float32 `[rows, TILE]`. Prefetch their values."""
    whole = types.int64
    signature = types.void(parts, queries, whole, keys, values, whole, places, whole, whole, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, queries, rows, *both, base, places, at, chunks, out = pointers(
            context, builder, signature, args
        )
        both, places = [builder.gep(plane, [base]) for plane in both], builder.gep(places, [at])
        plane, other = (_Plane(builder, pointer, keys, len(parts)) for pointer in both)
        emit, apart = plane.emit, plane.columns * LANES
        with cgutils.for_range(builder, chunks, intp=WIDE) as loop:
            chunk = builder.mul(loop.index, ir.Constant(WIDE, LANES))
            starts = [builder.load(builder.gep(places, [emit.at(chunk, i)])) for i in range(LANES)]
            for start in starts:
                other.prefetch(start)
            with cgutils.for_range(builder, rows, intp=WIDE) as each:
                query = builder.gep(queries, [builder.mul(each.index, ir.Constant(WIDE, apart))])

                def product(key: int, query: Any = query, starts: list[Any] = starts) -> Any:
                    total = ir.Constant(FLOATS, None)
                    for v, factor in enumerate(plane.key(starts[key])):
                        query_vector = emit.load(query, ir.Constant(WIDE, v * LANES), INTS)
                        total = emit.added(total, query_vector, factor)
                    return total

                row = builder.mul(each.index, ir.Constant(WIDE, TILE))
                emit.store(_summed(emit, product, 0, LANES), out, builder.add(row, chunk))
        return context.get_dummy_value()

    return signature, generate


def _summed(emit: Emit, vector: Any, first: int, count: int) -> Any:
    """Return one vector of partial lane sums, by halves, of `count` vectors from `vector(first)`
    on. Each vector's partial sums are `LANES / count` neighbouring lanes."""
    if count == 1:
        return vector(first)
    two = [_summed(emit, vector, at, count // 2) for at in (first, first + count // 2)]
    half = LANES // count
    low = [start + i for start in range(0, 2 * LANES, 2 * half) for i in range(half)]
    masks = [ir.Constant(INTS, [i + by for i in low]) for by in (0, half)]
    return emit.builder.fadd(*(emit.builder.shuffle_vector(*two, mask) for mask in masks))


@intrinsic  # type: ignore[misc]
def _online_softmax(
    typing: Any, rows: Any, scores: Any, chunks: Any, scaling: Any, most: Any, totals: Any,
    rescales: Any,
) -> Any:  # fmt: skip
    """Turn a tile's `scores` `[rows, TILE]` into softmax weights relative to the largest scaled
    score so far, `most` `[rows, 16]`, equal in all lanes. Updates `totals` `[rows, 16]`, the sums
    of weights, and writes `rescales` `[rows, 16]`, the factors that rescale earlier weights."""
    signature = types.void(types.int64, scores, types.int64, types.float32, most, totals, rescales)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, scores, chunks, scaling, most, totals, rescales = pointers(
            context, builder, signature, args
        )
        emit, factor = Emit(builder), Emit(builder).everywhere(scaling, FLOATS)
        best, total = (cgutils.alloca_once(builder, FLOATS) for _ in range(2))
        with cgutils.for_range(builder, rows, intp=WIDE) as each:
            row_scores = builder.gep(scores, [builder.mul(each.index, ir.Constant(WIDE, TILE))])
            here = builder.mul(each.index, ir.Constant(WIDE, LANES))
            before = emit.load(most, here)
            builder.store(before, best)
            with cgutils.for_range(builder, chunks, intp=WIDE) as loop:
                at = builder.mul(loop.index, ir.Constant(WIDE, LANES))
                score = builder.fmul(emit.load(row_scores, at), factor)
                emit.store(score, row_scores, at)
                builder.store(emit.larger(builder.load(best), score), best)
            now = emit.largest(builder.load(best))
            rescale = emit.exp(builder.fsub(before, now))
            builder.store(builder.fmul(emit.load(totals, here), rescale), total)
            with cgutils.for_range(builder, chunks, intp=WIDE) as loop:
                at = builder.mul(loop.index, ir.Constant(WIDE, LANES))
                weight = emit.exp(builder.fsub(emit.load(row_scores, at), now))
                builder.store(builder.fadd(builder.load(total), weight), total)
                emit.store(weight, row_scores, at)
            emit.store(now, most, here)
            emit.store(builder.load(total), totals, here)
            emit.store(rescale, rescales, here)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[misc]
def _write_output(
    typing: Any, parts: Any, i: Any, totals: Any, sums: Any, kind: Any, out: Any, at: Any
) -> Any:
    """Write the i-th query's weighted mean to `out[at:]`, in column order."""
    signature = types.void(parts, types.int64, totals, sums, kind, out, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, i, totals, sums, plane, out, at = pointers(context, builder, signature, args)
        emit, plane = Emit(builder), _Plane(builder, plane, kind, len(parts))
        width = ir.Constant(WIDE, plane.columns * LANES)
        sums, out = builder.gep(sums, [builder.mul(i, width)]), builder.gep(out, [at])
        total = emit.load(totals, builder.mul(i, ir.Constant(WIDE, LANES)))
        scale = builder.fdiv(emit.number(1.0), emit.total(total))
        given = [emit.load(sums, ir.Constant(WIDE, v * LANES)) for v in range(plane.columns)]
        for v, vector in enumerate(plane.in_order(given)):
            emit.store(builder.fmul(vector, scale), out, ir.Constant(WIDE, v * LANES))
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[misc]
def _add(
    typing: Any, parts: Any, row: Any, rows: Any, weights: Any, rescales: Any, count: Any,
    values: Any, places: Any, keys: Any, where: Any, sums: Any,
) -> Any:  # fmt: skip
    """Rescale `sums` `[rows, dim]` by `rescales` and add `weights` `[rows, TILE]` times the first
    `count` values, for up to GROUP rows from `row` on. `where`: offset of the head in `values`,
    first index in `places`; then for the keys to prefetch: offset of their head, first index in
    `places`, and number of keys."""
    whole, kind = types.int64, values
    signature = types.void(
        parts, whole, whole, weights, rescales, whole, values, places, keys, where, sums
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, rows, weights, rescales, count, values, places, keys, where, sums = pointers(
            context, builder, signature, args
        )
        base, at, after, then, ahead = cgutils.unpack_tuple(builder, where)
        width = len(parts) * LANES * (1 if kind.dtype == types.float32 else 2)
        weights, rescales, sums = (
            builder.gep(array, [builder.mul(row, ir.Constant(WIDE, apart))])
            for array, apart in ((weights, TILE), (rescales, LANES), (sums, width))
        )
        arrays = weights, rescales, sums, builder.gep(places, [at]), builder.gep(places, [then])
        both = builder.gep(values, [base]), builder.gep(keys, [after])
        planes = [_Plane(builder, pointer, kind, len(parts)) for pointer in both]
        each_count(builder, rows, GROUP, lambda n: _emit_sums(n, planes, arrays, (count, ahead)))
        return context.get_dummy_value()

    return signature, generate


def _emit_sums(rows: int, planes: list[_Plane], arrays: Any, counts: Any) -> None:
    """Process all rows, as many columns at a time as fit in registers."""
    (values, keys), (weights, rescales, sums, places, later) = planes, arrays
    count, ahead = counts
    emit, builder, step = values.emit, values.emit.builder, 2 if values.by_pairs else 1
    most = COLUMNS // LANES * len(values.parts) // values.columns
    for begin in values.parts[::most]:
        parts = values.parts[begin : begin + most]
        columns = [range(part, values.columns, len(values.parts)) for part in parts]
        cells = [(row, v) for row in range(rows) for v in chain.from_iterable(columns)]
        totals = {part: cgutils.alloca_once(builder, FLOATS) for part in cells}
        at = {
            part: ir.Constant(WIDE, (part[0] * values.columns + part[1]) * LANES) for part in cells
        }
        for part, total in totals.items():
            rescale = emit.load(rescales, ir.Constant(WIDE, part[0] * LANES))
            builder.store(builder.fmul(emit.load(sums, at[part]), rescale), total)
        turns = builder.udiv(emit.at(count, step - 1), ir.Constant(WIDE, step))
        with cgutils.for_range(builder, turns, intp=WIDE) as loop:
            turn = [emit.at(loop.index, 0, step, i) for i in range(step)]
            for i in turn if begin == 0 else ():
                near = builder.select(builder.icmp_signed("<", i, ahead), i, ir.Constant(WIDE, 0))
                keys.prefetch(builder.load(builder.gep(later, [near])))
            here = [builder.load(builder.gep(places, [i])) for i in turn]
            read = [values.values(here, part) for part in parts]
            for row in range(rows):
                weight = emit.spread(weights, emit.at(loop.index, row * TILE))
                for numbers, own in zip(read, columns, strict=True):
                    for v, vector in zip(own, numbers, strict=True):
                        emit.add_product(totals[row, v], weight, vector)
        for part, total in totals.items():
            emit.store(builder.load(total), sums, at[part])
