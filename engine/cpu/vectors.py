"""Emit vector code for numba intrinsics: LLVM vectors of sixteen 32-bit lanes. A plain loop over an
array would not keep its sums in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from engine.cpu.jit import FEATURES

LANES = 16
PANEL = 2 * LANES  # outputs whose packed weights are stored together

FLOAT, INT, WIDE = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
BYTES, LINE = (ir.VectorType(ir.IntType(8), lanes) for lanes in (LANES, 4 * LANES))


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat` type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
# Lower and upper bytes of 0 to 127 as bfloat16.
_SIZES = (
    (np.arange(128, dtype=np.float32).view(np.uint32) >> 16).astype("<u2")[:, None].view("u1").T
)


def pointers(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Return the arguments, with arrays replaced by their data pointers."""
    return [
        context.make_array(kind)(context, builder, arg).data
        if isinstance(kind, types.Array)
        else arg
        for kind, arg in zip(signature.args, args, strict=True)
    ]


def each_count(builder: Any, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit separate code for each value of `count` from 1 to `most`."""
    end = builder.append_basic_block("end")
    blocks = [builder.append_basic_block(f"of.{n + 1}") for n in range(most)]
    choice = builder.switch(count, blocks[-1])
    for n, block in enumerate(blocks, 1):
        choice.add_case(ir.Constant(WIDE, n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(end)
    builder.position_at_end(end)


HAS_AVX512 = bool(FEATURES.get("avx512f", False))  # 32 registers of sixteen lanes, not 16 of eight
MULTIPLIES_PAIRS = bool(FEATURES.get("avx512bf16", False))  # has the bfloat16 pair instruction

# Whether float32 arithmetic does more products per second than that instruction: true on all
# processors with it except AMD's.
SLOW_PAIRS = not llvmlite.binding.get_host_cpu_name().startswith("znver")


def over_lanes(builder: Any, vector: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce all lanes by halves with `join`; every lane of the result holds the total."""
    step = LANES // 2
    while step:
        turn = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
        vector = join(builder, vector, builder.shuffle_vector(vector, vector, turn))
        step //= 2
    return vector


class Emit:
    """Emits vector code at the builder's position."""

    def __init__(self, builder: Any, *, pairs: bool = False) -> None:
        self.builder = builder
        self.pairs = pairs
        kinds = [FLOATS, PAIRS, PAIRS] if pairs else [FLOATS] * 3
        name = "llvm.x86.avx512bf16.dpbf16ps.512" if pairs else f"llvm.fmuladd.v{LANES}f32"
        self._add = self.function(name, FLOATS, kinds)

    def function(self, name: str, answer: Any, arguments: list[Any]) -> Any:
        return cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(answer, arguments), name
        )

    def load(self, pointer: Any, at: Any, kind: Any = FLOATS) -> Any:
        place = self.builder.gep(pointer, [at])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=4)

    def store(self, vector: Any, pointer: Any, at: Any) -> None:
        place = self.builder.gep(pointer, [at])
        self.builder.store(vector, self.builder.bitcast(place, vector.type.as_pointer()), align=4)

    def at(self, value: Any, more: int, factor: int = 1, last: int = 0) -> Any:
        """Return `(value + more) * factor + last`."""
        scaled = self.builder.mul(value, ir.Constant(WIDE, factor))
        return self.builder.add(scaled, ir.Constant(WIDE, more * factor + last))

    def prefetch(self, pointer: Any, at: Any, *, near: bool) -> None:
        """Prefetch an element's cache line into L1 (`near`) or only into L2."""
        byte = ir.IntType(8).as_pointer()
        place = self.builder.bitcast(self.builder.gep(pointer, [at]), byte)
        how = [ir.Constant(INT, n) for n in (0, 3 if near else 2, 1)]  # read, locality, data
        name = "llvm.prefetch.p0i8"
        self.builder.call(self.function(name, ir.VoidType(), [byte, *[INT] * 3]), [place, *how])

    def halves(self, words: Any) -> list[Any]:
        """Split words of two bfloat16 into the first and the second numbers: float32 bits."""
        low, high = (ir.Constant(INTS, [n] * LANES) for n in (16, 0xFFFF0000))
        return [self.builder.shl(words, low), self.builder.and_(words, high)]

    def widened(self, pointer: Any, at: Any) -> Any:
        """Load int8 of sixteen outputs and two inputs, a PANEL apart; return them like `halves`."""
        numbers = (
            self.load(pointer, self.builder.add(at, ir.Constant(WIDE, i)), BYTES)
            for i in (0, PANEL)
        )
        return [self.builder.bitcast(self.builder.sitofp(n, FLOATS), INTS) for n in numbers]

    def looked_up(self, pointer: Any, at: Any) -> list[Any]:
        """Return a panel's two vectors of words from 64 int8 as sign and size. Uses AVX512_VBMI,
        which all AMD processors with AVX512_BF16 have."""
        b, codes = self.builder, self.load(pointer, at, LINE)
        select = self.function("llvm.x86.avx512.vpermi2var.qi.512", LINE, [LINE] * 3)
        tables = [[ir.Constant(LINE, list(half)) for half in np.split(t, 2)] for t in _SIZES]
        low, high = (b.call(select, [one, codes, two]) for one, two in tables)
        high = b.or_(high, b.and_(codes, ir.Constant(LINE, [0x80] * LINE.count)))
        order = np.arange(2 * LINE.count).reshape(2, 4, 2, 8).transpose(2, 1, 3, 0).reshape(2, -1)
        masks = [ir.Constant(ir.VectorType(INT, LINE.count), half) for half in order.tolist()]
        return [b.bitcast(b.shuffle_vector(low, high, mask), INTS) for mask in masks]

    def joined(self, halves: Sequence[Any]) -> Any:
        """Return the words of two `halves` that bfloat16 holds exactly."""
        low, high = halves
        return self.builder.or_(self.builder.lshr(low, ir.Constant(INTS, [16] * LANES)), high)

    def rounded(self, low: Any, high: Any) -> Any:
        """Round 32 consecutive float32 to sixteen words of two bfloat16: to nearest, ties to even.
        NaN stays NaN."""
        b = self.builder
        if MULTIPLIES_PAIRS:
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            call = self.function(name, PAIRS, [FLOATS] * 2)
            return b.bitcast(b.call(call, [high, low]), INTS)
        by, one, half, nan = (ir.Constant(INTS, [n] * LANES) for n in (16, 1, 0x7FFF, 0x7FC0))
        parts = []
        for offset in (0, 1):
            mask = ir.Constant(INTS, [2 * lane + offset for lane in range(LANES)])
            number = b.shuffle_vector(low, high, mask)
            bits = b.bitcast(number, INTS)
            up = b.add(half, b.and_(b.lshr(bits, by), one))
            upper = b.lshr(b.add(bits, up), by)
            parts.append(b.select(b.fcmp_unordered("uno", number, number), nan, upper))
        return b.or_(parts[0], b.shl(parts[1], by))

    def everywhere(self, element: Any, kind: Any) -> Any:
        """Return a vector with the element in every lane."""
        nothing = ir.Constant(kind, ir.Undefined)
        single = self.builder.insert_element(nothing, element, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(single, nothing, ir.Constant(INTS, [0] * LANES))

    def spread(self, pointer: Any, at: Any) -> Any:
        """Load an element into every lane."""
        place = self.builder.bitcast(self.builder.gep(pointer, [at]), INT.as_pointer())
        return self.everywhere(self.builder.load(place), INTS)

    def added(self, total: Any, left: Any, right: Any) -> Any:
        """Return `total + left * right`; the factors are bits in integer vectors."""
        kind = PAIRS if self.pairs else FLOATS
        factors = [self.builder.bitcast(x, kind) for x in (left, right)]
        given = [total, *factors] if self.pairs else [*factors, total]
        return self.builder.call(self._add, given)

    def add_product(self, total: Any, left: Any, right: Any) -> None:
        """Add `left * right` to the variable `total`."""
        self.builder.store(self.added(self.builder.load(total), left, right), total)

    def larger(self, one: Any, other: Any) -> Any:
        most = self.function(f"llvm.maxnum.v{LANES}f32", FLOATS, [FLOATS] * 2)
        return self.builder.call(most, [one, other])

    def number(self, value: float) -> Any:
        return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)

    def total(self, vector: Any) -> Any:
        """Return the sum of the lanes, in every lane."""
        return over_lanes(self.builder, vector, lambda b, *two: b.fadd(*two))

    def largest(self, vector: Any) -> Any:
        """Return the largest lane, in every lane."""
        return over_lanes(self.builder, vector, lambda _, *two: self.larger(*two))

    def exp(self, x: Any) -> Any:
        """Return e**x for x <= 0, 0 below -87, with an error of about 2e-7: 2**n times a polynomial
        (Cephes, expf). NaN stays NaN."""
        b = self.builder
        add = self.function(f"llvm.fmuladd.v{LANES}f32", FLOATS, [FLOATS] * 3)
        magic = self.number(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number
        far = b.fcmp_ordered("<", x, self.number(-87.0))
        x = b.select(far, self.number(-87.0), x)
        shifted = b.call(add, [x, self.number(1.44269504088896341), magic])
        n = b.fsub(shifted, magic)
        r = b.call(add, [n, self.number(-0.693359375), x])
        r = b.call(add, [n, self.number(2.12194440e-4), r])
        p = self.number(1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
        ):  # fmt: skip
            p = b.call(add, [p, r, self.number(coefficient)])
        p = b.call(add, [p, b.fmul(r, r), b.fadd(r, self.number(1.0))])
        bits = b.shl(b.bitcast(shifted, INTS), ir.Constant(INTS, [23] * LANES))
        scale = b.bitcast(b.add(bits, ir.Constant(INTS, [127 << 23] * LANES)), FLOATS)
        return b.select(far, self.number(0.0), b.fmul(p, scale))
