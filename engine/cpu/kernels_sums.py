"""Sums over arrays as LLVM vectors: their order is this code's, and never the compiler's choice."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.vectors import FLOAT, FLOATS, LANES, WIDE, Emit, pointers, sum_of_lanes


@intrinsic  # type: ignore[misc]
def dot(typing: Any, one: Any, at: Any, other: Any, there: Any, count: Any) -> Any:
    """Sum of the products of `count` numbers of either array of float32 from a place on: sixteen
    sums, which are added up by halves, then what is left over, one by one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, at, other, there, count = pointers(context, builder, signature, args)
        emit, step = Emit(builder), ir.Constant(WIDE, LANES)
        one, other = builder.gep(one, [at]), builder.gep(other, [there])
        whole = builder.and_(count, ir.Constant(WIDE, -LANES))
        sums = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, None))
        with cgutils.for_range_slice(builder, ir.Constant(WIDE, 0), whole, step, WIDE) as (i, _):
            emit.add_product(sums, emit.load(one, i), emit.load(other, i))
        total = cgutils.alloca_once_value(builder, sum_of_lanes(builder, builder.load(sums)))
        add = emit.function("llvm.fmuladd.f32", FLOAT, [FLOAT] * 3)
        with cgutils.for_range_slice(builder, whole, count, ir.Constant(WIDE, 1), WIDE) as (i, _):
            factors = [builder.load(builder.gep(array, [i])) for array in (one, other)]
            builder.store(builder.call(add, [*factors, builder.load(total)]), total)
        return builder.load(total)

    whole = types.int64
    return types.float32(one, whole, other, whole, whole), generate
