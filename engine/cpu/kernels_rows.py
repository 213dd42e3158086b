"""A Llama's operations between matrix products: norm, rotary embedding, gate. Each row is computed
by itself, so its bits do not depend on other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast, fast_in_place
from engine.cpu.vectors import FLOAT, FLOATS, INT, LANES, WIDE, Emit, pointers


@fast_in_place
def normalise(rows: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Write the RMSNorm (arXiv:1910.07467) of each row of `rows` `[rows, width]` to `out`."""
    width = rows.shape[1]
    for row in range(rows.shape[0]):
        numbers, normed = rows[row], out[row]
        mean = dot(numbers, numbers, width) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + epsilon)
        for i in range(width):
            normed[i] = numbers[i] * scale * weight[i]


@fast_in_place
def add(added: Any, rows: Any) -> None:
    """Add `added` `[rows, width or more]` to `rows` `[rows, width]`."""
    for row in range(rows.shape[0]):
        sums, more = rows[row], added[row]
        for i in range(len(sums)):
            sums[i] += more[i]


@fast_in_place
def rotate(packed: Any, cosine: Any, signed: Any, positions: Any, heads: Any) -> None:
    """Apply the rotary embedding (arXiv:2104.09864) in place to the first `heads` heads of each row
    of `packed` `[rows, heads or more * dim]`. `cosine`, `signed`: `[positions, dim]`; `signed` is
    the sine with its first half negated."""
    dim = cosine.shape[1]
    half = dim // 2
    for row in range(packed.shape[0]):
        c, s = cosine[positions[row]], signed[positions[row]]
        for head in range(heads):
            part = packed[row, head * dim : (head + 1) * dim]
            for i in range(half):
                low, high = part[i], part[half + i]
                part[i] = low * c[i] + high * s[i]
                part[half + i] = high * c[half + i] + low * s[half + i]


@fast_in_place
def gate(wide: Any, out: Any) -> None:
    """Write silu(gate) * up to `out` `[rows, inner]`; `wide` `[rows, >= 2 * inner]`: gate, up."""
    rows, inner = out.shape
    for row in range(rows):
        gates, ups, gated = wide[row, :inner], wide[row, inner:], out[row]
        for i in range(inner):
            gated[i] = gates[i] / (np.float32(1) + exp(-gates[i])) * ups[i]


@fast
def exp(x: Any) -> Any:
    """Return e**x with an error of about 2e-6, in a form that becomes vector code: 2**n times a
    polynomial (Cephes, expf). numba's own exp calls the C library for each number."""
    x = min(max(x, np.float32(-87)), np.float32(88))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693147181)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1)) * scale


@intrinsic  # type: ignore[misc]
def dot(typing: Any, one: Any, other: Any, count: Any) -> Any:
    """Return the dot product of the first `count` numbers of two float32 arrays: sixteen sums,
    added by halves, then the remainder one by one. This code fixes the order of summation; the
    compiler does not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, other, count = pointers(context, builder, signature, args)
        emit, step = Emit(builder), ir.Constant(WIDE, LANES)
        whole = builder.and_(count, ir.Constant(WIDE, -LANES))
        sums = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, None))
        with cgutils.for_range_slice(builder, ir.Constant(WIDE, 0), whole, step, WIDE) as (i, _):
            emit.add_product(sums, emit.load(one, i), emit.load(other, i))
        lanes = emit.total(builder.load(sums))
        first = builder.extract_element(lanes, ir.Constant(INT, 0))
        total = cgutils.alloca_once_value(builder, first)
        fused = emit.function("llvm.fmuladd.f32", FLOAT, [FLOAT] * 3)
        with cgutils.for_range_slice(builder, whole, count, ir.Constant(WIDE, 1), WIDE) as (i, _):
            factors = [builder.load(builder.gep(array, [i])) for array in (one, other)]
            builder.store(builder.call(fused, [*factors, builder.load(total)]), total)
        return builder.load(total)

    return types.float32(one, other, types.int64), generate
