"""Sums of values by their weights, as LLVM vectors. See `engine.cpu.kernels_attention`.

Two neighbouring keys make a pair with their weights; where pairs are slow, values are taken apart
into float32, once for all rows (`engine.cpu.kernels_bfloat16`). Meanwhile the next keys are asked
for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.kernels_pages import ask_for, base, divided
from engine.cpu.vectors import FLOATS, INTS, LANES, SLOW_PAIRS, Emit, halves_of, pointers

VALUE_ROWS = 5  # rows that share a reading of the values
SUMS = 24  # vectors that fit the registers beside what is read
SHARES = np.float32 if SLOW_PAIRS else np.uint16  # bfloat16, as the other factors of pairs

_INT = ir.IntType(32)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_MASK = ir.VectorType(_INT, LANES)


def weighing(rows: int) -> Any:
    """A function of compiled code."""

    @intrinsic  # type: ignore[misc]
    def weigh(
        typing: Any, parts: Any, shares: Any, width: Any, values: Any, slots: Any, count: Any,
        keys: Any, then: Any, left: Any, out: Any,
    ) -> Any:  # fmt: skip
        """`out` float32 `[rows, dim]`: sums of `values` by `shares`, `[rows, width]` of SHARES;
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
    out = builder.bitcast(out, FLOATS.as_pointer())
    most = max(SUMS // (2 * rows), 1)
    weigh, in_order = (_weigh_halves, _alternately) if SLOW_PAIRS else (_weigh_pairs, _in_order)
    for first in range(0, vectors, most):
        parts, zero = range(first, min(first + most, vectors)), ir.Constant(FLOATS, None)
        sums = [
            [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in parts]
            for _ in range(rows)
        ]
        more = None if first else ahead
        weigh(builder, (vectors, parts), (shares, values, slots), (width, count), sums, more)
        for row in range(rows):
            for part, both in zip(parts, sums[row], strict=True):
                for i, vector in enumerate(in_order(builder, [builder.load(s) for s in both])):
                    at = ir.Constant(count.type, 2 * (row * vectors + part) + i)
                    builder.store(vector, builder.gep(out, [at]), align=4)


def _weigh_pairs(builder: Any, size: Any, arrays: Any, sizes: Any, sums: Any, ahead: Any) -> None:
    """By row and part, two vectors of sums in the order of `_paired`."""
    (vectors, parts), (shares, values, slots), (width, count) = size, arrays, sizes
    shares, values = (
        builder.bitcast(p, k.as_pointer()) for p, k in ((shares, _INT), (values, _HALVES))
    )
    emit = Emit(builder, pairs=True)
    kind, half = count.type, builder.udiv(width, ir.Constant(width.type, 2))
    with cgutils.for_range(builder, divided(builder, count, 2)) as loop:
        first = builder.mul(loop.index, ir.Constant(kind, 2))
        if ahead is not None:
            _ask_for_keys(builder, vectors, ahead, first)
        bases = [
            base(builder, vectors, slots, builder.add(first, ir.Constant(kind, i)))
            for i in range(2)
        ]
        pairs = []
        for part in parts:
            places = [builder.add(base, ir.Constant(kind, part)) for base in bases]
            read = [builder.load(builder.gep(values, [at]), align=4) for at in places]
            pairs.append(_paired(builder, read))
        for row, mine in enumerate(sums):
            at = builder.add(builder.mul(half, ir.Constant(kind, row)), loop.index)
            share = emit.spread(shares, at)
            for totals, two in zip(mine, pairs, strict=True):
                for total, pair in zip(totals, two, strict=True):
                    emit.add_product(total, share, pair)


def _weigh_halves(builder: Any, size: Any, arrays: Any, sizes: Any, sums: Any, ahead: Any) -> None:
    """By row and part, a vector of sums of even elements and one of odd ones."""
    (vectors, parts), (shares, values, slots), (width, count) = size, arrays, sizes
    values = builder.bitcast(values, INTS.as_pointer())
    kind, emit = count.type, Emit(builder)
    with cgutils.for_range(builder, count) as loop:
        if ahead is not None:
            _ask_for_keys(builder, vectors, ahead, loop.index, count=1)
        at = base(builder, vectors, slots, loop.index)
        places = [builder.add(at, ir.Constant(kind, part)) for part in parts]
        halves = [
            halves_of(builder, builder.load(builder.gep(values, [at]), align=4)) for at in places
        ]
        for row, mine in enumerate(sums):
            at = builder.add(builder.mul(width, ir.Constant(kind, row)), loop.index)
            share = emit.spread(shares, at)
            for totals, two in zip(mine, halves, strict=True):
                for total, half in zip(totals, two, strict=True):
                    emit.add_product(total, share, half)


def _ask_for_keys(builder: Any, vectors: int, ahead: Any, first: Any, count: int = 2) -> None:
    """So many of those that come next, if there are as many."""
    keys, slots, left = ahead
    keys = builder.bitcast(keys, INTS.as_pointer())
    places = [builder.add(first, ir.Constant(first.type, i)) for i in range(count)]
    with builder.if_then(builder.icmp_signed("<", places[-1], left)):
        for at in places:
            ask_for(builder, vectors, keys, base(builder, vectors, slots, at))


def _paired(builder: Any, two: list[Any]) -> list[Any]:
    """Numbers of one and of another alternately: quarters' lower halves, then their upper ones.
    (The order that one instruction makes.)"""
    wide = ir.VectorType(_INT, 2 * LANES)
    found = []
    for by in (0, 4):
        mask = [8 * part + by + i + 32 * j for part in range(4) for i in range(4) for j in (0, 1)]
        found.append(builder.shuffle_vector(*two, ir.Constant(wide, mask)))
    return found


def _in_order(builder: Any, two: list[Any]) -> list[Any]:
    """What `_paired` did, undone for sums: a lane of quarters 0 .. 3 of either, alternately."""
    masks = [
        [4 * part + i + LANES * j for part in parts for j in (0, 1) for i in range(4)]
        for parts in ((0, 1), (2, 3))
    ]
    return [builder.shuffle_vector(*two, ir.Constant(_MASK, mask)) for mask in masks]


def _alternately(builder: Any, two: list[Any]) -> list[Any]:
    """Even elements and odd ones, in order."""
    order = [i + LANES * j for i in range(LANES) for j in (0, 1)]
    masks = (order[:LANES], order[LANES:])
    return [builder.shuffle_vector(*two, ir.Constant(_MASK, mask)) for mask in masks]
