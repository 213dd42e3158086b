"""Scores of a few queries with all keys, as LLVM vectors. See `engine.cpu.kernels_attention`.

Sixteen keys at a time, whose sixteen partial sums each are added up by halves. Where pairs are
slow, keys are taken apart into float32, once for all rows (`engine.cpu.kernels_bfloat16`).
Meanwhile their values are asked for.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.kernels_pages import ask_for, base, divided
from engine.cpu.vectors import (
    FLOATS,
    INTS,
    LANES,
    SLOW_PAIRS,
    Emit,
    halves_of,
    pointers,
)

ROWS_AT_ONCE = 8

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
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
    kind, emit = count.type, Emit(builder)
    keys, values = (builder.bitcast(plane, INTS.as_pointer()) for plane in (keys, values))
    best = cgutils.alloca_once(builder, FLOATS, size=ROWS_AT_ONCE)
    for row in range(ROWS_AT_ONCE):
        builder.store(_LOWEST, builder.gep(best, [ir.Constant(kind, row)]))
    last = builder.sub(builder.add(count, rows), ir.Constant(kind, 1))
    with cgutils.for_range(builder, divided(builder, last, LANES)) as loop:
        first = builder.mul(loop.index, ir.Constant(kind, LANES))
        places = _places(builder, vectors, slots, first)
        for place in places:
            ask_for(builder, vectors, values, place)
        products = _by_halves if SLOW_PAIRS else _by_pairs
        of_query = products(builder, vectors, keys, places)
        with cgutils.for_range(builder, rows) as each:
            row = each.index
            query = builder.gep(queries, [builder.mul(row, stride)])
            sums = of_query(builder.bitcast(query, INTS.as_pointer()))
            end = builder.add(count, row)
            left = emit.everywhere(builder.trunc(builder.sub(end, first), _INT), INTS)
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
    places = [builder.add(first, ir.Constant(first.type, i)) for i in range(LANES)]
    return [base(builder, vectors, slots, at) for at in places]


def _by_pairs(builder: Any, vectors: int, keys: Any, places: list[Any]) -> Any:
    """A function of a query: its products with sixteen keys, as sixteen partial sums each."""

    def of_query(query: Any) -> list[Any]:
        kind, emit, sums = places[0].type, Emit(builder, pairs=True), []
        mine = [_vector(builder, query, ir.Constant(kind, part)) for part in range(vectors)]
        for place in places:
            total = ir.Constant(FLOATS, None)
            for part in range(vectors):
                at = builder.add(place, ir.Constant(kind, part))
                total = emit.added(total, mine[part], _vector(builder, keys, at))
            sums.append(total)
        return sums

    return of_query


def _by_halves(builder: Any, vectors: int, keys: Any, places: list[Any]) -> Any:
    """The same; keys are taken apart before the first query."""
    kind, emit, each = places[0].type, Emit(builder), 2 * vectors
    space = cgutils.alloca_once(builder, FLOATS, size=LANES * each)

    def halves_at(pointer: Any, first: Any) -> list[Any]:
        found = []
        for part in range(vectors):
            at = builder.add(first, ir.Constant(kind, part))
            found += halves_of(builder, _vector(builder, pointer, at))
        return [builder.bitcast(half, FLOATS) for half in found]

    def kept(key: int) -> list[Any]:
        return [builder.gep(space, [ir.Constant(kind, key * each + i)]) for i in range(each)]

    for key, place in enumerate(places):
        for half, at in zip(halves_at(keys, place), kept(key), strict=True):
            builder.store(half, at)

    def of_query(query: Any) -> list[Any]:
        mine, sums = halves_at(query, ir.Constant(kind, 0)), []
        for key in range(LANES):
            total = ir.Constant(FLOATS, None)
            for half, at in zip(mine, kept(key), strict=True):
                total = emit.added(total, half, builder.load(at))
            sums.append(total)
        return sums

    return of_query


def _vector(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.load(builder.gep(pointer, [at]), align=4)


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
