"""Compiled attention of a few rows over paged keys and values, on one thread.

Keys and values are read where they lie, once for all rows and query heads that share them
(grouped-query attention, arXiv:2305.13245), in tiles that stay in the caches, with an online
softmax (arXiv:1805.02867) and all sums in float32. While a tile's keys are read its values are
asked for, and meanwhile the next tile's keys: blocks lie anywhere, which no processor foresees.

A row's sums run over its own sequence's keys in order, in tiles counted from key 0; a key that it
may not see has weight zero, which changes no bit. So its result is the same to the bit whatever
rows and sequences share the call. A key that is not a number spoils its own sequence only.

Keys and values are float32, or words of two bfloat16. Where that pays (`kernels_products`), words
are multiplied as pairs, queries and weights being rounded; else they are taken apart as they are
read. Columns of sums then stand in another order: the even ones, then the odd ones.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast
from engine.cpu.kernels_products import BY_PAIRS, keep
from engine.cpu.vectors import FLOATS, HAS_AVX512, INTS, LANES, WIDE, Emit, each_count, pointers

SPAN_ROWS = 64  # bits in a mask
TILE = 16 * LANES  # keys
# Queries whose sums of so many columns fit the registers beside the values.
GROUP, COLUMNS = (5, 4 * LANES) if HAS_AVX512 else (2, 2 * LANES)
LOWEST = np.float32(-3e38)  # below every score; finite, so that lowest - lowest is 0


@fast
def attend(
    parts: Any, packed: Any, heads: Any, facts: Any, seen: Any, places: Any, scaling: Any,
    keys: Any, values: Any, out: Any,
) -> None:  # fmt: skip
    """Write the keys and values of all rows to their slots of `keys` and `values`
    `[kv_heads, slots, words]`, then attend. `packed` float32 `[rows, at least (heads + 2 *
    kv_heads) * dim]`: query, key and value heads; `out` `[rows, heads * dim]`. `facts` `[spans,
    3]`: first row, rows, KV index of the first. `places`: see `places_of`. Bit i of `seen[row]`:
    whether it sees the key of its span's i-th row; earlier keys it does. `parts` is a tuple of
    `words / LANES` numbers, so that each size of a head has code of its own."""
    kv_heads, _, words = keys.shape
    dim, group = out.shape[1] // heads, heads // kv_heads
    _write(packed, heads, facts, places, dim, keys)
    _write(packed, heads + kv_heads, facts, places, dim, values)
    most = facts[:, 1].max() * group  # queries of a head of keys
    asked, sums = np.empty((most, dim), np.uint32), np.empty((most, dim), np.float32)
    scores = np.empty((most, TILE), np.float32)
    lanes = (most, LANES)
    state = np.empty(lanes, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for span in range(facts.shape[0]):
        first, rows, _ = facts[span]
        for head in range(kv_heads):
            for i in range(group * rows):
                at = (head * group + i // rows) * dim
                _ask(packed, first + i % rows, at, dim, keys, asked, i)
            _attend(
                parts, asked, facts, seen, places, span, head, scaling, keys, values, scores,
                state, sums[: group * rows],
            )  # fmt: skip
            for i in range(group * rows):
                at = (head * group + i // rows) * dim
                mine = out[first + i % rows, at : at + dim]
                _answer(sums[i], state[1][i], words != dim, mine)


@fast
def _attend(
    parts: Any, asked: Any, facts: Any, seen: Any, places: Any, span: Any, head: Any, scaling: Any,
    keys: Any, values: Any, scores: Any, state: Any, sums: Any,
) -> None:  # fmt: skip
    """The queries of one head of keys: sums of weighted values, and of weights in `state`."""
    (first, rows, start), (peaks, totals, fades) = facts[span], state
    count, end, then = len(sums), start + rows, _following(facts, places, keys, span, head)
    flat_keys, flat_values = keys[head].reshape(-1), values[head].reshape(-1)
    sums[:] = 0
    peaks[:count] = LOWEST
    totals[:count] = 0
    for tile in range(0, end, TILE):
        here, some = places[span, tile:], min(TILE, end - tile)
        chunks = (some + LANES - 1) // LANES
        _score(parts, asked, count, flat_keys, flat_values, here, chunks, scores)
        if tile + TILE > start:
            for i in range(count):
                _hide(scores[i], seen[first + i % rows], tile, start, end)
        _soften(count, scores, chunks, scaling, peaks, totals, fades)
        inside = flat_keys, here[TILE:], end - tile - TILE
        later = inside if tile + TILE < end else then
        _add_all(parts, scores, fades, some, flat_values, here, later, sums)


@fast
def _following(facts: Any, places: Any, keys: Any, span: Any, head: Any) -> Any:
    """What is read behind a head: keys, their places and their number."""
    span, head = (span + (head + 1) // len(keys)) % len(facts), (head + 1) % len(keys)
    return keys[head].reshape(-1), places[span], facts[span, 1] + facts[span, 2]


@fast
def _write(packed: Any, before: Any, facts: Any, places: Any, dim: Any, plane: Any) -> None:
    """The heads of all rows that stand behind so many, to their places in `plane`."""
    for head in range(plane.shape[0]):
        flat, first = plane[head].reshape(-1), (before + head) * dim
        for span in range(facts.shape[0]):
            for row in range(facts[span, 1]):
                at = (facts[span, 0] + row) * packed.shape[1] + first
                there = places[span, facts[span, 2] + row]
                keep(packed, at, flat, there, plane.shape[2], plane)


@fast
def _ask(packed: Any, row: Any, at: Any, dim: Any, keys: Any, asked: Any, i: Any) -> None:
    """A query as keys are read: of words taken apart the even columns, then the odd ones."""
    words, half = keys.shape[2], dim // 2
    if words == dim or BY_PAIRS:
        keep(packed, row * packed.shape[1] + at, asked, i * dim, words, keys)
        return
    bits, out = packed[row, at : at + dim].view(np.uint32), asked[i]
    for j in range(half):
        out[j], out[half + j] = bits[2 * j], bits[2 * j + 1]


@fast
def places_of(facts: Any, tables: Any, block_size: Any, words: Any) -> Any:
    """Where each span's keys begin in a head's plane, `[spans, keys and more]`, from `tables`
    `[spans, blocks]`; behind them the last key, to fill the last sixteen."""
    spans, most = facts.shape[0], (facts[:, 1] + facts[:, 2]).max()
    out = np.empty((spans, most + LANES), np.int64)
    for span in range(spans):
        end = facts[span, 1] + facts[span, 2]
        for first in range(0, end, block_size):
            slot = tables[span, first // block_size] * block_size
            for i in range(min(block_size, end - first)):
                out[span, first + i] = (slot + i) * words
        out[span, end : end + LANES] = out[span, end - 1]
    return out


@fast
def _hide(scores: Any, seen: Any, tile: Any, start: Any, end: Any) -> None:
    """Keys that a row may not see, and those that fill up."""
    for i in range(max(0, start - tile), min(TILE, end + LANES - tile)):
        at = tile + i
        if at >= end or not (seen >> np.uint64(at - start)) & np.uint64(1):
            scores[i] = -np.inf


@fast
def _answer(sums: Any, totals: Any, pairs: Any, out: Any) -> None:
    """The weighted mean, columns in their order."""
    total, half = np.float32(0), len(out) // 2
    for lane in range(LANES):
        total += totals[lane]
    scale = np.float32(1) / total
    if not pairs:
        for i in range(len(out)):
            out[i] = sums[i] * scale
        return
    for i in range(half):
        out[2 * i], out[2 * i + 1] = sums[i] * scale, sums[half + i] * scale


class _Plane:
    """A head's keys or values in memory, float32 or words."""

    def __init__(self, builder: Any, pointer: Any, kind: Any, parts: int) -> None:
        """`parts`: vectors of words that are one key."""
        self.words = kind.dtype != types.float32
        self.by_pairs = self.words and BY_PAIRS
        self.emit = Emit(builder, pairs=self.by_pairs)
        self.parts = range(parts)
        self.columns = parts * (2 if self.words else 1)  # vectors in float32
        self.pointer = builder.bitcast(pointer, ir.IntType(32).as_pointer())

    def load(self, place: Any, part: int) -> Any:
        return self.emit.load(self.pointer, self.emit.at(place, part * LANES), INTS)

    def key(self, place: Any) -> list[Any]:
        """What begins at a place, as vectors of float32 or of pairs."""
        read = [self.load(place, part) for part in self.parts]
        if self.by_pairs or not self.words:
            return read
        even, odd = zip(*map(self.emit.halves, read), strict=True)
        return [*even, *odd]

    def values(self, places: list[Any], part: int) -> list[Any]:
        """The vectors of columns of a part: of one value or, as pairs, of two."""
        read = [self.load(place, part) for place in places]
        if not self.by_pairs:
            return self.emit.halves(read[0]) if self.words else read
        (one, other), b = read, self.emit.builder
        by, low, high = (ir.Constant(INTS, [n] * LANES) for n in (16, 0xFFFF, 0xFFFF0000))
        return [
            b.or_(b.and_(one, low), b.shl(other, by)),
            b.or_(b.lshr(one, by), b.and_(other, high)),
        ]

    def fetch(self, place: Any) -> None:
        for part in self.parts:
            self.emit.fetch(self.pointer, self.emit.at(place, part * LANES), near=False)


@intrinsic  # type: ignore[misc]
def _score(
    typing: Any, parts: Any, queries: Any, rows: Any, keys: Any, values: Any, places: Any,
    chunks: Any, out: Any,
) -> Any:  # fmt: skip
    """The products of `queries` `[rows, dim]` with the keys at the first sixteen times `chunks`
    places: `out` float32 `[rows, TILE]`. Their values are asked for."""
    whole = types.int64
    signature = types.void(parts, queries, whole, keys, values, places, whole, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, queries, rows, *both, places, chunks, out = pointers(context, builder, signature, args)
        plane, other = (_Plane(builder, pointer, keys, len(parts)) for pointer in both)
        emit, apart = plane.emit, plane.columns * LANES
        with cgutils.for_range(builder, chunks, intp=WIDE) as loop:
            chunk = builder.mul(loop.index, ir.Constant(WIDE, LANES))
            starts = [builder.load(builder.gep(places, [emit.at(chunk, i)])) for i in range(LANES)]
            for start in starts:
                other.fetch(start)
            with cgutils.for_range(builder, rows, intp=WIDE) as each:
                query = builder.gep(queries, [builder.mul(each.index, ir.Constant(WIDE, apart))])

                def product(key: int, query: Any = query, starts: list[Any] = starts) -> Any:
                    total = ir.Constant(FLOATS, None)
                    for v, factor in enumerate(plane.key(starts[key])):
                        mine = emit.load(query, ir.Constant(WIDE, v * LANES), INTS)
                        total = emit.added(total, mine, factor)
                    return total

                row = builder.mul(each.index, ir.Constant(WIDE, TILE))
                emit.store(_summed(emit, product, 0, LANES), out, builder.add(row, chunk))
        return context.get_dummy_value()

    return signature, generate


def _summed(emit: Emit, vector: Any, first: int, count: int) -> Any:
    """In one vector, the sums of the lanes of `count` vectors from `vector(first)` on, by halves;
    each one's are `LANES / count` neighbours still."""
    if count == 1:
        return vector(first)
    two = [_summed(emit, vector, at, count // 2) for at in (first, first + count // 2)]
    half = LANES // count
    low = [start + i for start in range(0, 2 * LANES, 2 * half) for i in range(half)]
    masks = [ir.Constant(INTS, [i + by for i in low]) for by in (0, half)]
    return emit.builder.fadd(*(emit.builder.shuffle_vector(*two, mask) for mask in masks))


@intrinsic  # type: ignore[misc]
def _soften(
    typing: Any, rows: Any, scores: Any, chunks: Any, scaling: Any, most: Any, totals: Any,
    fades: Any,
) -> Any:  # fmt: skip
    """A tile's `scores` `[rows, TILE]` become weights relative to the largest scaled score so far,
    `most` `[rows, 16]`, equal in all lanes. `totals` `[rows, 16]`: sums of weights. `fades`
    `[rows, 16]`: what earlier weights are to be multiplied by."""
    whole, single = types.int64, types.float32
    signature = types.void(whole, scores, whole, single, most, totals, fades)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, scores, chunks, scaling, most, totals, fades = pointers(
            context, builder, signature, args
        )
        emit, factor = Emit(builder), Emit(builder).everywhere(scaling, FLOATS)
        best, total = (cgutils.alloca_once(builder, FLOATS) for _ in range(2))
        with cgutils.for_range(builder, rows, intp=WIDE) as each:
            mine = builder.gep(scores, [builder.mul(each.index, ir.Constant(WIDE, TILE))])
            here = builder.mul(each.index, ir.Constant(WIDE, LANES))
            before = emit.load(most, here)
            builder.store(before, best)
            with cgutils.for_range(builder, chunks, intp=WIDE) as loop:
                at = builder.mul(loop.index, ir.Constant(WIDE, LANES))
                score = builder.fmul(emit.load(mine, at), factor)
                emit.store(score, mine, at)
                builder.store(emit.larger(builder.load(best), score), best)
            now = emit.largest(builder.load(best))
            fade = emit.exp(builder.fsub(before, now))
            builder.store(builder.fmul(emit.load(totals, here), fade), total)
            with cgutils.for_range(builder, chunks, intp=WIDE) as loop:
                at = builder.mul(loop.index, ir.Constant(WIDE, LANES))
                weight = emit.exp(builder.fsub(emit.load(mine, at), now))
                builder.store(builder.fadd(builder.load(total), weight), total)
                emit.store(weight, mine, at)
            emit.store(now, most, here)
            emit.store(builder.load(total), totals, here)
            emit.store(fade, fades, here)
        return context.get_dummy_value()

    return signature, generate


@fast
def _add_all(
    parts: Any, scores: Any, fades: Any, some: Any, values: Any, here: Any, later: Any, sums: Any
) -> None:
    """A tile's weighted values to the sums of all queries, equal parts of them at a time. As pairs
    weights are rounded, in their places."""
    (keys, places, ahead), weights, i = later, scores.view(np.uint32), 0
    if BY_PAIRS and len(parts) * LANES != sums.shape[1]:
        words = (some + 2 * LANES - 1) // (2 * LANES) * LANES
        for row in range(len(sums)):
            keep(scores, row * TILE, weights, row * TILE, words, weights)
    for left in range((len(sums) + GROUP - 1) // GROUP, 0, -1):
        more = (len(sums) - i) // left
        _add(parts, more, weights[i:], fades[i:], some, values, here, keys, places, ahead, sums[i:])
        i += more


@intrinsic  # type: ignore[misc]
def _add(
    typing: Any, parts: Any, rows: Any, weights: Any, fades: Any, count: Any, values: Any,
    places: Any, keys: Any, later: Any, ahead: Any, sums: Any,
) -> Any:  # fmt: skip
    """`sums` `[rows, dim]`, faded, plus `weights` `[rows, TILE]` times the values at the first
    `count` places, of up to GROUP rows. The keys that come `later` are asked for, as far as there
    are so many `ahead`."""
    whole, kind = types.int64, values
    signature = types.void(
        parts, whole, weights, fades, whole, values, places, keys, later, whole, sums
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows, weights, fades, count, values, places, keys, later, ahead, sums = pointers(
            context, builder, signature, args
        )
        arrays = weights, fades, sums, places, later
        planes = [_Plane(builder, pointer, kind, len(parts)) for pointer in (values, keys)]
        each_count(builder, rows, GROUP, lambda n: _emit_sums(n, planes, arrays, (count, ahead)))
        return context.get_dummy_value()

    return signature, generate


def _emit_sums(rows: int, planes: list[_Plane], arrays: Any, counts: Any) -> None:
    """A few columns of all rows after the others, where not all fit the registers."""
    (values, keys), (weights, fades, sums, places, later) = planes, arrays
    count, ahead = counts
    emit, builder, step = values.emit, values.emit.builder, 2 if values.by_pairs else 1
    most = COLUMNS // LANES * len(values.parts) // values.columns
    for begin in values.parts[::most]:
        parts = values.parts[begin : begin + most]
        columns = [range(part, values.columns, len(values.parts)) for part in parts]
        mine = [(row, v) for row in range(rows) for v in chain.from_iterable(columns)]
        totals = {part: cgutils.alloca_once(builder, FLOATS) for part in mine}
        at = {
            part: ir.Constant(WIDE, (part[0] * values.columns + part[1]) * LANES) for part in mine
        }
        for part, total in totals.items():
            fade = emit.load(fades, ir.Constant(WIDE, part[0] * LANES))
            builder.store(builder.fmul(emit.load(sums, at[part]), fade), total)
        turns = builder.udiv(emit.at(count, step - 1), ir.Constant(WIDE, step))
        with cgutils.for_range(builder, turns, intp=WIDE) as loop:
            turn = [emit.at(loop.index, 0, step, i) for i in range(step)]
            for i in turn if begin == 0 else ():
                near = builder.select(builder.icmp_signed("<", i, ahead), i, ir.Constant(WIDE, 0))
                keys.fetch(builder.load(builder.gep(later, [near])))
            here = [builder.load(builder.gep(places, [i])) for i in turn]
            read = [values.values(here, part) for part in parts]
            for row in range(rows):
                weight = emit.spread(weights, emit.at(loop.index, row * TILE))
                for numbers, own in zip(read, columns, strict=True):
                    for v, vector in zip(own, numbers, strict=True):
                        emit.add_product(totals[row, v], weight, vector)
        for part, total in totals.items():
            emit.store(builder.load(total), sums, at[part])
