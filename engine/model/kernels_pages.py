"""Scores of a few queries with all keys, and sums of values by their weights, as LLVM vectors. See
`engine.model.kernels_attention`, which puts them together.

Scores: sixteen keys at a time, whose sixteen partial sums each are added up by halves. Values: two
neighbouring keys make a pair with their weights. Blocks lie anywhere, which no processor foresees:
while keys are multiplied their values are asked for, and with these the next head's keys.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.attention.vectors import FLOATS, INTS, LANES, PAIRS, pointers
from engine.model.kernels_bfloat16 import multiply_add, spread
from engine.model.kernels_tiles import Tiles

ROWS_AT_ONCE = 8
VALUE_ROWS = 5  # rows that share a reading of the values
SUMS = 24  # vectors that fit the registers beside what is read

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_MASK = ir.VectorType(_INT, LANES)
_LOWEST = ir.Constant(FLOATS, [float("-inf")] * LANES)


def scoring(rows: int | None) -> Any:
    """A function of compiled code, for so many rows or, if None, for any."""

    @intrinsic  # type: ignore[misc]
    def scores(
        typing: Any, parts: Any, queries: Any, shape: Any, keys: Any, values: Any, slots: Any,
        out: Any, largest: Any,
    ) -> Any:  # fmt: skip
        """`queries`, `keys` and `values` words; `out` float32 `[rows, width]`, of which row i is
        -inf from `count + i` on; `largest` `[rows]`. `shape`: rows, words from one query to the
        next, count, width. `slots` int64 may be read up to the next multiple of LANES, where `out`
        may be written. `parts` is a tuple of as many numbers as a head has vectors, so that each
        width has code of its own."""
        signature = types.void(parts, queries, shape, keys, values, slots, out, largest)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, queries, shape, *arrays = pointers(context, builder, signature, args)
            sizes = [builder.extract_value(shape, i) for i in range(4)]
            if rows is not None:
                sizes[0] = ir.Constant(sizes[0].type, rows)
            _emit_scores(builder, len(signature.args[0]), (queries, *arrays), sizes)
            return context.get_dummy_value()

        return signature, generate

    return scores


def _emit_scores(builder: Any, vectors: int, arrays: Any, sizes: Any) -> None:
    """Sixteen keys after sixteen for all rows: they come from memory once."""
    queries, keys, values, slots, out, largest = arrays
    rows, stride, count, width = sizes
    kind = count.type
    keys, values = (builder.bitcast(plane, INTS.as_pointer()) for plane in (keys, values))
    best = cgutils.alloca_once(builder, FLOATS, size=ROWS_AT_ONCE)
    for row in range(ROWS_AT_ONCE):
        builder.store(_LOWEST, builder.gep(best, [ir.Constant(kind, row)]))
    last = builder.sub(builder.add(count, rows), ir.Constant(kind, 1))
    with cgutils.for_range(builder, _divided(builder, last, LANES)) as loop:
        first = builder.mul(loop.index, ir.Constant(kind, LANES))
        places = _places(builder, vectors, slots, first)
        for place in places:
            _ask_for(builder, vectors, values, place)
        with cgutils.for_range(builder, rows) as each:
            row = each.index
            query = builder.gep(queries, [builder.mul(row, stride)])
            sums = _products(builder, vectors, query, keys, places)
            end = builder.add(count, row)
            left = spread(builder, builder.trunc(builder.sub(end, first), _INT))
            seen = builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), left)
            found = builder.select(seen, _added_up(builder, sums), _LOWEST)
            at = builder.add(builder.mul(row, width), first)
            place = builder.bitcast(builder.gep(out, [at]), FLOATS.as_pointer())
            builder.store(found, place, align=4)
            mine = builder.gep(best, [row])
            known = builder.load(mine)
            more = builder.fcmp_ordered(">", found, known)
            builder.store(builder.select(more, found, known), mine)
    reduce = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOAT, [FLOATS]), f"llvm.vector.reduce.fmax.v{LANES}f32"
    )
    with cgutils.for_range(builder, rows) as each:
        found = builder.call(reduce, [builder.load(builder.gep(best, [each.index]))])
        builder.store(found, builder.gep(largest, [each.index]))


def _places(builder: Any, vectors: int, slots: Any, first: Any) -> list[Any]:
    """Where the next sixteen keys or values begin, in vectors."""
    found = []
    for i in range(LANES):
        at = builder.add(first, ir.Constant(first.type, i))
        slot = builder.load(builder.gep(slots, [at]))
        found.append(builder.mul(slot, ir.Constant(first.type, vectors)))
    return found


def _ask_for(builder: Any, vectors: int, plane: Any, place: Any) -> None:
    """A key or its values. Until their turn comes more is read than the first cache holds."""
    tiles = Tiles(builder)
    for line in range(vectors):
        tiles.fetch(tiles.place(plane, place, line), near=False)


def _products(builder: Any, vectors: int, query: Any, keys: Any, places: Any) -> list[Any]:
    """Of a query with sixteen keys, as sixteen partial sums each."""
    query, kind = builder.bitcast(query, INTS.as_pointer()), places[0].type
    mine = [_load_pairs(builder, query, ir.Constant(kind, part)) for part in range(vectors)]
    sums = []
    for place in places:
        total = ir.Constant(FLOATS, None)
        for part in range(vectors):
            at = builder.add(place, ir.Constant(kind, part))
            total = multiply_add(builder, total, mine[part], _load_pairs(builder, keys, at))
        sums.append(total)
    return sums


def _divided(builder: Any, count: Any, by: int) -> Any:
    """Upwards."""
    up = builder.add(count, ir.Constant(count.type, by - 1))
    return builder.udiv(up, ir.Constant(count.type, by))


def _load_pairs(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.bitcast(builder.load(builder.gep(pointer, [at]), align=4), PAIRS)


def _added_up(builder: Any, sums: list[Any]) -> Any:
    """Sixteen vectors to one: lane i is the sum of the lanes of vector i."""
    length = LANES
    while length > 1:
        half, halves = length // 2, []
        low = [start + i for start in range(0, 2 * LANES, length) for i in range(half)]
        for one, other in zip(sums[::2], sums[1::2], strict=True):
            parts = [
                builder.shuffle_vector(one, other, ir.Constant(_MASK, [i + by for i in low]))
                for by in (0, half)
            ]
            halves.append(builder.fadd(*parts))
        sums, length = halves, half
    return sums[0]


def weighing(rows: int) -> Any:
    """A function of compiled code."""

    @intrinsic  # type: ignore[misc]
    def weigh(
        typing: Any, parts: Any, shares: Any, width: Any, values: Any, slots: Any, count: Any,
        keys: Any, then: Any, left: Any, out: Any,
    ) -> Any:  # fmt: skip
        """`out` float32 `[rows, dim]`: sums of `values` by `shares`, bfloat16 `[rows, width]`;
        `parts` as above. `keys[then[:left]]` are asked for, as far as there are `count` of them."""
        signature = types.void(parts, shares, width, values, slots, count, keys, then, left, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = pointers(context, builder, signature, args)
            _, shares, width, values, slots, count, keys, then, left, out = given
            size, ahead = (len(signature.args[0]), rows), (keys, then, left)
            _emit_values(builder, size, (shares, values, slots, out), width, count, ahead)
            return context.get_dummy_value()

        return signature, generate

    return weigh


def _emit_values(builder: Any, size: Any, arrays: Any, width: Any, count: Any, ahead: Any) -> None:
    """A few vectors of all values after the others, if their sums do not fit the registers."""
    (vectors, rows), (shares, values, slots, out) = size, arrays
    shares, values = (
        builder.bitcast(p, k.as_pointer()) for p, k in ((shares, _INT), (values, _HALVES))
    )
    out = builder.bitcast(out, FLOATS.as_pointer())
    half = builder.udiv(width, ir.Constant(width.type, 2))
    most = max(SUMS // (2 * rows), 1)
    for first in range(0, vectors, most):
        parts = range(first, min(first + most, vectors))
        arrays, more = (shares, values, slots), None if first else ahead
        sums = _weigh(builder, (vectors, rows, parts), arrays, half, count, more)
        for row in range(rows):
            for part, both in zip(parts, sums[row], strict=True):
                for i, vector in enumerate(_in_order(builder, [builder.load(s) for s in both])):
                    at = ir.Constant(count.type, 2 * (row * vectors + part) + i)
                    builder.store(vector, builder.gep(out, [at]), align=4)


def _weigh(builder: Any, size: Any, pointers: Any, half: Any, count: Any, ahead: Any) -> Any:
    """By row and part, two vectors of sums in the order of `_paired`."""
    (vectors, rows, parts), (shares, values, slots) = size, pointers
    kind, zero = count.type, ir.Constant(FLOATS, None)
    sums = [
        [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in parts]
        for _ in range(rows)
    ]
    with cgutils.for_range(builder, _divided(builder, count, 2)) as loop:
        first = builder.mul(loop.index, ir.Constant(kind, 2))
        if ahead is not None:
            _ask_for_keys(builder, vectors, ahead, first)
        bases = []
        for i in range(2):
            slot = builder.load(builder.gep(slots, [builder.add(first, ir.Constant(kind, i))]))
            bases.append(builder.mul(slot, ir.Constant(kind, vectors)))
        pairs = []
        for part in parts:
            places = [builder.add(base, ir.Constant(kind, part)) for base in bases]
            read = [builder.load(builder.gep(values, [at]), align=4) for at in places]
            pairs.append(_paired(builder, read))
        for row in range(rows):
            at = builder.add(builder.mul(half, ir.Constant(kind, row)), loop.index)
            share = builder.bitcast(spread(builder, builder.load(builder.gep(shares, [at]))), PAIRS)
            for totals, two in zip(sums[row], pairs, strict=True):
                for total, pair in zip(totals, two, strict=True):
                    builder.store(multiply_add(builder, builder.load(total), share, pair), total)
    return sums


def _ask_for_keys(builder: Any, vectors: int, ahead: Any, first: Any) -> None:
    """Two of those that come next, if there are two more."""
    keys, slots, left = ahead
    keys, kind = builder.bitcast(keys, INTS.as_pointer()), first.type
    last = builder.add(first, ir.Constant(kind, 1))
    with builder.if_then(builder.icmp_signed("<", last, left)):
        for at in (first, last):
            slot = builder.load(builder.gep(slots, [at]))
            _ask_for(builder, vectors, keys, builder.mul(slot, ir.Constant(kind, vectors)))


def _paired(builder: Any, two: list[Any]) -> list[Any]:
    """Numbers of one and of another alternately: quarters' lower halves, then their upper ones.
    (The order that one instruction makes.)"""
    wide = ir.VectorType(_INT, 2 * LANES)
    found = []
    for by in (0, 4):
        mask = [8 * part + by + i + 32 * j for part in range(4) for i in range(4) for j in (0, 1)]
        found.append(builder.bitcast(builder.shuffle_vector(*two, ir.Constant(wide, mask)), PAIRS))
    return found


def _in_order(builder: Any, two: list[Any]) -> list[Any]:
    """What `_paired` did, undone for sums: a lane of quarters 0 .. 3 of either, alternately."""
    masks = [
        [4 * part + i + LANES * j for part in parts for j in (0, 1) for i in range(4)]
        for parts in ((0, 1), (2, 3))
    ]
    return [builder.shuffle_vector(*two, ir.Constant(_MASK, mask)) for mask in masks]
