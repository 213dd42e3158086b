"""Compiled attention of a few rows over paged keys and values, on one thread.

Keys and values are read where they lie, once for all rows and query heads that share them
(grouped-query attention, arXiv:2305.13245), in tiles of 32, with an online softmax
(arXiv:1805.02867) and all sums in float32. A tile's keys are turned into a buffer that stays in the
first cache, so that a vector holds sixteen keys at one depth and no sum runs across lanes.

A row's sums run over its own sequence's keys in order, in tiles counted from key 0; a key that it
may not see has weight zero, which changes no bit. So its result is the same to the bit whatever
rows and sequences share the call. A key that is not a number spoils its own sequence only.

Keys and values are words: float32, or pairs of bfloat16, which are widened tile by tile. Columns of
pairs then stand in another order: the even ones, then the odd ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast
from engine.cpu.kernels_products import upper_half
from engine.cpu.vectors import FLOATS, INTS, LANES, WIDE, Emit, pointers, transposed

SPAN_ROWS = 64  # bits in a mask
TILE = 2 * LANES  # keys; as many scores of four queries fill half of the registers
GROUP = 4  # queries whose sums fit the registers
AHEAD = 4 * TILE  # keys; memory is asked so far ahead
SHORT = 512  # keys that may still be in the caches
LOWEST = np.float32(-3e38)  # below every score; finite, so that lowest - lowest is 0


@fast
def attend(
    packed: Any, heads: Any, facts: Any, seen: Any, tables: Any, block_size: Any, scaling: Any,
    keys: Any, values: Any, out: Any,
) -> None:  # fmt: skip
    """Write the keys and values of all rows to their slots of `keys` and `values`
    `[kv_heads, slots, words]`, then attend. `packed` float32 `[rows, at least (heads + 2 *
    kv_heads) * dim]`: query, key and value heads; `out` `[rows, heads * dim]`. `facts` `[spans,
    3]`: first row, rows, KV index of the first. `tables` `[spans, blocks]`. Bit i of `seen[row]`:
    whether it sees the key of its span's i-th row; earlier keys it does."""
    kv_heads, _, words = keys.shape
    dim, group = out.shape[1] // heads, heads // kv_heads
    pairs = words != dim
    _write(packed, heads, facts, tables, block_size, pairs, keys)
    _write(packed, heads + kv_heads, facts, tables, block_size, pairs, values)
    most = facts[:, 1].max() * group + GROUP  # queries of a head of keys, filled up
    asked, sums = np.zeros((most, dim), np.uint32), np.empty((most, dim), np.float32)
    peaks, totals = np.empty((most, LANES), np.float32), np.empty((most, LANES), np.float32)
    scores, fades = np.empty((GROUP, TILE), np.float32), np.empty((GROUP, LANES), np.float32)
    turned, wide = np.empty((dim, TILE), np.uint32), np.empty((TILE, dim), np.uint32)
    rows_of_wide = np.arange(TILE) * dim
    for span in range(facts.shape[0]):
        first, rows, start = facts[span]
        end, count = start + rows, group * rows
        found = _places(tables[span], block_size, end, words)
        for head in range(kv_heads):
            flat_keys, flat_values = keys[head].reshape(-1), values[head].reshape(-1)
            for i in range(count):
                at = (head * group + i // rows) * dim
                _ask(packed[first + i % rows, at : at + dim], pairs, asked[i])
            sums[:count] = 0
            peaks[:count] = LOWEST
            totals[:count] = 0
            for tile in range(0, end, TILE):
                slots = found[tile : tile + TILE]
                if end > SHORT:
                    # Processors foresee two streams badly: 32,000 keys took 10.2 ms, 6.9 so.
                    _fetch(flat_keys, found[tile + AHEAD : tile + AHEAD + TILE], words)
                    _fetch(flat_values, found[tile + AHEAD : tile + AHEAD + TILE], words)
                if pairs:
                    _widen(flat_keys, slots, wide)
                    _turn(wide.reshape(-1), rows_of_wide, dim, turned)
                    _widen(flat_values, slots, wide)
                else:
                    _turn(flat_keys, slots, dim, turned)
                for i in range(0, count, GROUP):
                    some = 1 if count == 1 else GROUP
                    _score(some, asked[i:], dim, turned, scores)
                    if tile + TILE > start:
                        for j in range(min(some, count - i)):
                            _hide(scores[j], seen[first + (i + j) % rows], tile, start, end)
                    _soften(some, scores, scaling, peaks[i:], totals[i:], fades)
                    if pairs:
                        _add(some, scores, fades, wide.reshape(-1), rows_of_wide, sums[i:])
                    else:
                        _add(some, scores, fades, flat_values, slots, sums[i:])
            for i in range(count):
                at = (head * group + i // rows) * dim
                _answer(sums[i], totals[i], pairs, out[first + i % rows, at : at + dim])


@fast
def _write(
    packed: Any, before: Any, facts: Any, tables: Any, block_size: Any, pairs: Any, plane: Any
) -> None:
    """The heads of all rows that stand behind so many, to their slots of `plane`."""
    kv_heads, words = plane.shape[0], plane.shape[2]
    dim = 2 * words if pairs else words
    for span in range(facts.shape[0]):
        first, count, start = facts[span]
        for row in range(count):
            at = start + row
            slot = tables[span, at // block_size] * block_size + at % block_size
            for head in range(kv_heads):
                place = (before + head) * dim
                bits = packed[first + row, place : place + dim].view(np.uint32)
                mine = plane[head, slot]
                if pairs:
                    for i in range(words):
                        low = upper_half(bits[2 * i]) >> np.uint32(16)
                        mine[i] = low | upper_half(bits[2 * i + 1])
                else:
                    mine[:] = bits


@fast
def _ask(query: Any, pairs: Any, out: Any) -> None:
    """A query in the order of columns in which keys are turned."""
    bits, half = query.view(np.uint32), len(query) // 2
    if not pairs:
        out[:] = bits
        return
    for i in range(half):
        out[i], out[half + i] = bits[2 * i], bits[2 * i + 1]


@fast
def _places(table: Any, block_size: Any, end: Any, words: Any) -> Any:
    """Where keys begin in a head's plane; to fill the last tile, the last key once more."""
    out = np.empty((end + TILE - 1) // TILE * TILE, np.int64)
    for first in range(0, end, block_size):
        slot = table[first // block_size] * block_size
        for i in range(min(block_size, end - first)):
            out[first + i] = (slot + i) * words
    out[end:] = out[end - 1]
    return out


@fast
def _fetch(plane: Any, slots: Any, words: Any) -> None:
    for i in range(len(slots)):
        for word in range(0, words, LANES):
            _ask_for(plane, slots[i] + word)


@intrinsic  # type: ignore[misc]
def _ask_for(typing: Any, plane: Any, at: Any) -> Any:
    """The cache line of an element, to the second cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emit(builder).fetch(*pointers(context, builder, signature, args), near=False)
        return context.get_dummy_value()

    return types.void(plane, types.int64), generate


@fast
def _widen(plane: Any, slots: Any, wide: Any) -> None:
    """A tile of bfloat16 as float32."""
    half = wide.shape[1] // 2
    for j in range(TILE):
        pairs, out = plane[slots[j] : slots[j] + half], wide[j]
        for i in range(half):
            out[i] = pairs[i] << np.uint32(16)
            out[half + i] = pairs[i] & np.uint32(0xFFFF0000)


@fast
def _hide(scores: Any, seen: Any, tile: Any, start: Any, end: Any) -> None:
    """Keys that a row may not see, and those beyond the end."""
    for i in range(max(0, start - tile), TILE):
        at = tile + i
        if at >= end or not (seen >> np.uint64(at - start)) & np.uint64(1):
            scores[i] = -np.inf


@fast
def _add(some: Any, scores: Any, fades: Any, plane: Any, places: Any, sums: Any) -> None:
    """A tile's weighted values to the sums of some queries."""
    width = sums.shape[1]
    whole = width // (4 * LANES) * (4 * LANES)
    for column in range(0, whole, 4 * LANES):
        _add_wide(some, scores, fades, plane, places, sums, width, column)
    for column in range(whole, width, LANES):
        _add_narrow(some, scores, fades, plane, places, sums, width, column)


@fast
def _answer(sums: Any, totals: Any, pairs: Any, out: Any) -> None:
    """The weighted mean, columns in their order."""
    total, half = np.float32(0), len(out) // 2
    for lane in range(LANES):
        total += totals[lane]
    if not pairs:
        for i in range(len(out)):
            out[i] = sums[i] / total
        return
    for i in range(half):
        out[2 * i], out[2 * i + 1] = sums[i] / total, sums[half + i] / total


@intrinsic  # type: ignore[misc]
def _turn(typing: Any, plane: Any, offsets: Any, depth: Any, turned: Any) -> Any:
    """The rows of `plane` that begin at `offsets` `[TILE]` become the columns of `turned` `[depth,
    TILE]`. `depth` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, starts, depth, target = pointers(context, builder, signature, args)
        emit, zero, step = Emit(builder), ir.Constant(WIDE, 0), ir.Constant(WIDE, LANES)
        places = [builder.load(builder.gep(starts, [ir.Constant(WIDE, j)])) for j in range(TILE)]
        with cgutils.for_range_slice(builder, zero, depth, step, WIDE) as (first, _):
            for column in range(0, TILE, LANES):
                rows = [builder.add(place, first) for place in places[column : column + LANES]]
                vectors = [emit.load(source, row, INTS) for row in rows]
                for i, vector in enumerate(transposed(builder, vectors)):
                    emit.store(vector, target, emit.at(first, i, TILE, column))
        return context.get_dummy_value()

    return types.void(plane, offsets, types.int64, turned), generate


def _one_or_group(emit_for: Any) -> Any:
    """Code of its own for one query and for GROUP of them, chosen by the first argument."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = pointers(context, builder, signature, args)
        one = builder.icmp_signed("==", given[0], ir.Constant(WIDE, 1))
        with builder.if_else(one) as (alone, together):
            with alone:
                emit_for(Emit(builder), 1, *given[1:])
            with together:
                emit_for(Emit(builder), GROUP, *given[1:])
        return context.get_dummy_value()

    return generate


@intrinsic  # type: ignore[misc]
def _score(typing: Any, some: Any, query: Any, depth: Any, turned: Any, out: Any) -> Any:
    """The products of queries `[rows, depth]` with a tile's keys `[depth, TILE]`: `out` float32
    `[rows, TILE]`."""

    def emit_for(emit: Emit, rows: int, query: Any, depth: Any, turned: Any, out: Any) -> None:
        builder, vectors = emit.builder, range(TILE // LANES)
        parts, zero = [(row, v) for row in range(rows) for v in vectors], ir.Constant(FLOATS, None)
        sums = {part: cgutils.alloca_once_value(builder, zero) for part in parts}
        for total in sums.values():
            builder.store(zero, total)
        with cgutils.for_range(builder, depth, intp=WIDE) as loop:
            places = [emit.at(loop.index, 0, TILE, v * LANES) for v in vectors]
            keys = [emit.load(turned, place, INTS) for place in places]
            for row in range(rows):
                mine = builder.mul(depth, ir.Constant(WIDE, row))
                factor = emit.spread(query, builder.add(mine, loop.index))
                for v, key in enumerate(keys):
                    emit.add_product(sums[row, v], factor, key)
        for row, v in parts:
            emit.store(builder.load(sums[row, v]), out, ir.Constant(WIDE, row * TILE + v * LANES))

    whole = types.int64
    return types.void(whole, query, whole, turned, out), _one_or_group(emit_for)


@intrinsic  # type: ignore[misc]
def _soften(
    typing: Any, some: Any, scores: Any, scaling: Any, most: Any, totals: Any, fades: Any
) -> Any:
    """A tile's `scores` `[rows, TILE]` become weights relative to the largest scaled score so far,
    `most` `[rows, 16]`, equal in all lanes. `totals` `[rows, 16]`: sums of weights. `fades`
    `[rows, 16]`: what earlier weights are to be multiplied by."""

    def emit_for(
        emit: Emit, rows: int, scores: Any, scaling: Any, most: Any, totals: Any, fades: Any
    ) -> None:
        builder, factor = emit.builder, emit.everywhere(scaling, FLOATS)
        for row in range(rows):
            here = ir.Constant(WIDE, row * LANES)
            places = [ir.Constant(WIDE, row * TILE + v * LANES) for v in range(TILE // LANES)]
            found = [builder.fmul(emit.load(scores, at), factor) for at in places]
            before = emit.load(most, here)
            now = emit.larger(before, emit.largest(emit.larger(*found)))
            fade = emit.exp(builder.fsub(before, now))
            total = builder.fmul(emit.load(totals, here), fade)
            for at, score in zip(places, found, strict=True):
                weight = emit.exp(builder.fsub(score, now))
                emit.store(weight, scores, at)
                total = builder.fadd(total, weight)
            emit.store(now, most, here)
            emit.store(total, totals, here)
            emit.store(fade, fades, here)

    signature = types.void(types.int64, scores, types.float32, most, totals, fades)
    return signature, _one_or_group(emit_for)


def _adding(vectors: int) -> Any:
    """A function of compiled code: weighted sums of `16 * vectors` columns of values."""

    @intrinsic  # type: ignore[misc]
    def add(
        typing: Any, some: Any, weights: Any, fades: Any, plane: Any, offsets: Any, out: Any,
        width: Any, column: Any,
    ) -> Any:  # fmt: skip
        """`out` `[rows, width]`, faded, plus `weights` `[rows, TILE]` times the rows of `plane`
        that begin at `offsets[:TILE]`; columns `column ..` of all."""
        whole = types.int64
        signature = types.void(whole, weights, fades, plane, offsets, out, whole, whole)
        return signature, _one_or_group(emit_for)

    def emit_for(
        emit: Emit, rows: int, weights: Any, fades: Any, plane: Any, offsets: Any, out: Any,
        width: Any, column: Any,
    ) -> None:  # fmt: skip
        builder, places, sums = emit.builder, {}, {}
        for row in range(rows):
            mine = builder.add(builder.mul(width, ir.Constant(WIDE, row)), column)
            fade = emit.load(fades, ir.Constant(WIDE, row * LANES))
            for v in range(vectors):
                places[row, v] = emit.at(mine, v * LANES)
                sums[row, v] = cgutils.alloca_once(builder, FLOATS)
                builder.store(builder.fmul(emit.load(out, places[row, v]), fade), sums[row, v])
        with cgutils.for_range(builder, ir.Constant(WIDE, TILE), intp=WIDE) as loop:
            start = builder.add(builder.load(builder.gep(offsets, [loop.index])), column)
            read = [emit.load(plane, emit.at(start, v * LANES), INTS) for v in range(vectors)]
            for row in range(rows):
                weight = emit.spread(weights, emit.at(loop.index, row * TILE))
                for v, value in enumerate(read):
                    emit.add_product(sums[row, v], weight, value)
        for part, place in places.items():
            emit.store(builder.load(sums[part]), out, place)

    return add


_add_wide, _add_narrow = _adding(4), _adding(1)
