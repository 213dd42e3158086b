"""Softmax of scores in base two, as LLVM vectors: all keys' scores of a query are there before the
first weight is made, so a weight depends on nobody's order."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.kernels_heads import fused, number
from engine.cpu.kernels_tiles import SIDE
from engine.cpu.vectors import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    PAIRS,
    WIDE,
    Emit,
    over_lanes,
    pointers,
    sum_of_lanes,
)

LOG2_E = np.float32(1.4426950408889634)

_LEAST = -126.0  # powers of two below are zero
_AS_EVER = 4  # how the processor rounds
# 2**r for r from -1/2 to 1/2, to 2.6e-6 of it (Remez)
_POWERS = (9.570102207e-3, 5.5917859077e-2, 2.40247443318e-1, 6.93121790886e-1, 9.99999284744e-1)


@intrinsic  # type: ignore[misc]
def softmax(
    typing: Any, turned: Any, to: Any, columns: Any, column: Any, count: Any, blocks: Any,
    factor: Any, scores: Any, shares: Any, at: Any,
) -> Any:  # fmt: skip
    """Weights of the first `count` scores of a column of `turned[to:]` `[keys, columns]`, zeros up
    to `blocks` times SIDE, as words `shares[at:]` with a bfloat16 in their low halves, and behind
    these in their high ones; answers one by the sum of the weights. A weight is two to the power of
    `factor` times the score, less that of the largest. `scores` float32 of as many is space."""
    whole = types.int64
    signature = types.float32(
        turned, whole, whole, whole, whole, whole, types.float32, scores, shares, whole
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = pointers(context, builder, signature, args)
        turned, to, columns, column, count, blocks, factor, scores, shares, at = given
        emit, turned = Emit(builder), builder.gep(turned, [to])
        most = _column(emit, (turned, columns, column), (count, blocks), scores)
        factor = emit.everywhere(factor, FLOATS)
        shift = builder.fneg(builder.fmul(factor, over_lanes(builder, most, _larger)))
        total = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, None))
        behind = builder.add(at, builder.mul(blocks, number(SIDE)))
        with cgutils.for_range(builder, blocks, intp=WIDE) as loop:
            first = builder.mul(loop.index, number(SIDE))
            share = power(emit, fused(emit, emit.load(scores, first), factor, shift))
            builder.store(builder.fadd(builder.load(total), share), total)
            low = builder.zext(_rounded(emit, share), INTS)
            emit.store(low, shares, builder.add(at, first))
            high = builder.shl(low, ir.Constant(INTS, [16] * LANES))
            emit.store(high, shares, builder.add(behind, first))
        return builder.fdiv(ir.Constant(FLOAT, 1.0), sum_of_lanes(builder, builder.load(total)))

    return signature, generate


@intrinsic  # type: ignore[misc]
def weights(
    typing: Any, scores: Any, first: Any, count: Any, largest: Any, factor: Any, shares: Any
) -> Any:
    """Weights of `scores[first:]`, of which `largest` is the largest, and those from `count` on
    -inf up to a multiple of LANES, in the same places of `shares`, float32 or bfloat16; answers
    their sum. Scores are multiplied by `factor` as powers of two; where that is above 2**31 they
    cancel, and a weight may be none or infinite."""
    whole, single = types.int64, types.float32
    as_they_are = shares.dtype == single

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, first, count, largest, factor, shares = pointers(context, builder, signature, args)
        emit, step = Emit(builder), number(LANES)
        shift = emit.everywhere(builder.fneg(builder.fmul(factor, largest)), FLOATS)
        factor = emit.everywhere(factor, FLOATS)
        total = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, None))
        with cgutils.for_range_slice(builder, number(0), count, step, WIDE) as (i, _):
            at = builder.add(first, i)
            share = power(emit, fused(emit, emit.load(scores, at), factor, shift))
            builder.store(builder.fadd(builder.load(total), share), total)
            emit.store(share if as_they_are else _rounded(emit, share), shares, at)
        return sum_of_lanes(builder, builder.load(total))

    return single(scores, whole, whole, single, single, shares), generate


def _rounded(emit: Emit, vector: Any) -> Any:
    """Halves: bfloat16, to nearest, ties to even."""
    kind = ir.VectorType(PAIRS.element, LANES)
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    found = emit.builder.call(emit.function(name, kind, [FLOATS]), [vector])
    return emit.builder.bitcast(found, ir.VectorType(ir.IntType(16), LANES))


def _column(emit: Any, source: Any, sizes: Any, scores: Any) -> Any:
    """Bring a column's scores together, -inf for keys it must not see; their largest, by lane."""
    (turned, columns, column), (count, blocks), builder = source, sizes, emit.builder
    lowest = ir.Constant(FLOATS, [float("-inf")] * LANES)
    lanes = ir.Constant(INTS, list(range(LANES)))
    single = builder.icmp_signed("==", columns, number(1))
    places = builder.mul(lanes, emit.everywhere(builder.trunc(columns, INT), INTS))
    found, best = (cgutils.alloca_once(builder, FLOATS) for _ in range(2))
    builder.store(lowest, best)
    with cgutils.for_range(builder, blocks, intp=WIDE) as loop:
        first = builder.mul(loop.index, number(SIDE))
        at = builder.add(builder.mul(first, columns), column)
        with builder.if_else(single) as (alone, among):
            with alone:
                builder.store(emit.load(turned, at), found)
            with among:
                builder.store(_gathered(emit, builder.gep(turned, [at]), places), found)
        left = emit.everywhere(builder.trunc(builder.sub(count, first), INT), INTS)
        seen = builder.icmp_signed("<", lanes, left)
        mine = builder.select(seen, builder.load(found), lowest)
        emit.store(mine, scores, first)
        builder.store(_larger(builder, builder.load(best), mine), best)
    return builder.load(best)


def _gathered(emit: Any, pointer: Any, places: Any) -> Any:
    bits, byte = ir.VectorType(ir.IntType(1), LANES), ir.IntType(8).as_pointer()
    gather = emit.function(
        "llvm.x86.avx512.mask.gather.dps.512", FLOATS, [FLOATS, byte, INTS, bits, INT]
    )
    given = [ir.Constant(FLOATS, None), emit.builder.bitcast(pointer, byte), places]
    return emit.builder.call(gather, [*given, ir.Constant(bits, [1] * LANES), ir.Constant(INT, 4)])


def power(emit: Any, x: Any) -> Any:
    """2**x; 0 below _LEAST. A NaN stays one."""
    builder, bits = emit.builder, ir.IntType(LANES)
    n = builder.call(emit.function(f"llvm.rint.v{LANES}f32", FLOATS, [FLOATS]), [x])
    r, p = builder.fsub(x, n), emit.number(_POWERS[0])
    for coefficient in _POWERS[1:]:
        p = fused(emit, p, r, emit.number(coefficient))
    kinds, name = [FLOATS] * 3 + [bits, INT], "llvm.x86.avx512.mask.scalef.ps.512"
    given = [p, n, p, ir.Constant(bits, -1), ir.Constant(INT, _AS_EVER)]
    found = builder.call(emit.function(name, FLOATS, kinds), given)
    far = builder.fcmp_ordered("<", x, emit.number(_LEAST))
    return builder.select(far, ir.Constant(FLOATS, None), found)


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)
