"""Pieces of attention over a tile of 32 keys, emitted as vector code: turn keys, score them, weigh
the scores, add values. Everything is 32 bits wide: a float32 or a pair of bfloat16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.vectors import FLOATS, INT, INTS, LANES, WIDE, Emit, pointers, transposed

TILE = 2 * LANES  # keys; as many scores of four queries fill half of the registers


@intrinsic  # type: ignore[misc]
def fetch(typing: Any, plane: Any, at: Any) -> Any:
    """Ask for the cache line of `plane[at]`, an element of a flat array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at = pointers(context, builder, signature, args)
        kinds = [ir.IntType(8).as_pointer(), *[INT] * 3]
        call = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0i8"
        )
        place = builder.bitcast(builder.gep(source, [at]), kinds[0])
        builder.call(call, [place, *(ir.Constant(INT, n) for n in (0, 2, 1))])  # read, keep, data
        return context.get_dummy_value()

    return types.void(plane, types.int64), generate


@intrinsic  # type: ignore[misc]
def turn(typing: Any, plane: Any, offsets: Any, depth: Any, turned: Any, column: Any) -> Any:
    """Sixteen rows of `plane`, which begin at `offsets[column:]`, become columns `column ..` of
    `turned` `[depth, TILE]`. `depth` is a multiple of 16."""
    signature = types.void(plane, offsets, types.int64, turned, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, starts, depth, target, column = pointers(context, builder, signature, args)
        emit = Emit(builder)
        rows = [builder.load(builder.gep(starts, [emit.at(column, j)])) for j in range(LANES)]
        zero, step = ir.Constant(WIDE, 0), ir.Constant(WIDE, LANES)
        with cgutils.for_range_slice(builder, zero, depth, step, WIDE) as (first, _):
            vectors = [emit.load(source, builder.add(row, first), INTS) for row in rows]
            for i, vector in enumerate(transposed(builder, vectors)):
                at = builder.add(emit.at(first, i, TILE), column)
                emit.store(vector, target, at)
        return context.get_dummy_value()

    return signature, generate


def scores_of(rows: int, *, pairs: bool) -> Any:
    """A function of compiled code: the products of `rows` queries with a tile's keys."""

    @intrinsic  # type: ignore[misc]
    def scores(typing: Any, query: Any, depth: Any, turned: Any, out: Any) -> Any:
        """`query` `[rows, depth]`, `turned` `[depth, TILE]`, `out` float32 `[rows, TILE]`."""
        signature = types.void(query, types.int64, turned, out)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            query, depth, turned, out = pointers(context, builder, signature, args)
            emit = Emit(builder, pairs=pairs)
            parts = [(row, v) for row in range(rows) for v in range(TILE // LANES)]
            zero = ir.Constant(FLOATS, None)
            sums = {part: cgutils.alloca_once_value(builder, zero) for part in parts}
            with cgutils.for_range(builder, depth, intp=WIDE) as loop:
                keys = [
                    emit.load(turned, emit.at(loop.index, 0, TILE, v * LANES), INTS)
                    for v in range(TILE // LANES)
                ]
                for row in range(rows):
                    mine = builder.mul(depth, ir.Constant(WIDE, row))
                    factor = emit.spread(query, builder.add(mine, loop.index))
                    for v, key in enumerate(keys):
                        emit.add_product(sums[row, v], factor, key)
            for row, v in parts:
                at = ir.Constant(WIDE, row * TILE + v * LANES)
                emit.store(builder.load(sums[row, v]), out, at)
            return context.get_dummy_value()

        return signature, generate

    return scores


def softmax_of(rows: int) -> Any:
    """A function of compiled code: a tile's scores join the softmax of `rows` queries."""

    @intrinsic  # type: ignore[misc]
    def softmax(typing: Any, scores: Any, scaling: Any, most: Any, totals: Any, fades: Any) -> Any:
        """`scores` `[rows, TILE]` become weights relative to the largest scaled score so far,
        `most` `[rows, 16]`, equal in all lanes. `totals` `[rows, 16]`: sums of weights. `fades`
        `[rows, 16]`: what earlier weights are to be multiplied by."""
        signature = types.void(scores, types.float32, most, totals, fades)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            scores, scaling, most, totals, fades = pointers(context, builder, signature, args)
            emit = Emit(builder)
            factor = emit.everywhere(scaling, FLOATS)
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
            return context.get_dummy_value()

        return signature, generate

    return softmax


def values_of(rows: int, vectors: int, *, pairs: bool) -> Any:
    """A function of compiled code: `rows` weighted sums of `16 * vectors` columns of values."""

    @intrinsic  # type: ignore[misc]
    def values(
        typing: Any, weights: Any, count: Any, fades: Any, plane: Any, offsets: Any, out: Any,
        width: Any, column: Any,
    ) -> Any:  # fmt: skip
        """`out` `[rows, width]`, faded, plus `weights` `[rows, count]` times the rows of `plane`
        that begin at `offsets[:count]`; columns `column ..` of all."""
        whole = types.int64
        signature = types.void(weights, whole, fades, plane, offsets, out, whole, whole)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, count, fades, plane, offsets, out, width, column = pointers(
                context, builder, signature, args
            )
            emit = Emit(builder, pairs=pairs)
            sums, places = {}, {}
            for row in range(rows):
                mine = builder.add(builder.mul(width, ir.Constant(WIDE, row)), column)
                fade = emit.load(fades, ir.Constant(WIDE, row * LANES))
                for v in range(vectors):
                    places[row, v] = emit.at(mine, v * LANES)
                    faded = builder.fmul(emit.load(out, places[row, v]), fade)
                    sums[row, v] = cgutils.alloca_once_value(builder, faded)
            with cgutils.for_range(builder, count, intp=WIDE) as loop:
                start = builder.add(builder.load(builder.gep(offsets, [loop.index])), column)
                read = [emit.load(plane, emit.at(start, v * LANES), INTS) for v in range(vectors)]
                for row in range(rows):
                    mine = builder.mul(count, ir.Constant(WIDE, row))
                    weight = emit.spread(weights, builder.add(mine, loop.index))
                    for v, value in enumerate(read):
                        emit.add_product(sums[row, v], weight, value)
            for part, place in places.items():
                emit.store(builder.load(sums[part]), out, place)
            return context.get_dummy_value()

        return signature, generate

    return values
