"""Products of a few rows in bfloat16, for processors that multiply pairs of it (AVX512_BF16).

One instruction takes a pair of inputs for sixteen outputs and adds to float32 sums. On AMD's
processors it makes twice as many products a second as float32 arithmetic, on Intel's half as many
(Emerald Rapids at 2.9 GHz: 43 and 91 thousand million): there pairs are taken apart into float32,
which is exact. Rows are rounded to bfloat16 first, as everywhere in that precision. A row's sums
run over the inputs in order whoever its neighbours are, so its result is the same to the bit in any
company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from engine.attention.vectors import (
    FLOATS,
    INT,
    INTS,
    LANES,
    PAIRS,
    SLOW_PAIRS,
    Emit,
    each_count,
    pointers,
)
from engine.jit import HAS_TILES, fast
from engine.model.kernels_tiles import SIDE, Tiles, product_of_tiles

VECTORS = 2  # in a panel: ten rows' sums fill most of the registers
PANEL = LANES * VECTORS
ROWS_AT_ONCE = 10  # beyond, compiled code runs out of registers
# Pairs of inputs whose weights are asked for before their turn, to the second cache and the first.
_FAR, _NEAR = 64, 8

Words = npt.NDArray[np.uint32]


def pack(weight: Tensor) -> Words:
    """`[out, in]`, `in` even -> `[panels, in / 2, PANEL]`. A word holds an output's weights for two
    inputs, the first in its low half; missing outputs are zero."""
    outputs, inputs = weight.shape
    assert inputs % 2 == 0
    bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    full = np.zeros((padded(outputs), inputs), dtype=np.uint16)
    full[:outputs] = bits
    words = full.view(np.uint32).reshape(-1, PANEL, inputs // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def padded(outputs: int) -> int:
    """Columns that a product with so many outputs writes."""
    return -(-outputs // PANEL) * PANEL


@intrinsic  # type: ignore[misc]
def _by_pairs(
    typing: Any, count: Any, x: Any, pairs: Any, words: Any, y: Any, stride: Any
) -> Any:  # fmt: skip
    """`PANEL` outputs of up to ROWS_AT_ONCE rows. `x` rows of `pairs` words each; `words` one
    panel; `y` float32, rows `stride` apart."""
    return for_panels((count, x, pairs, words, y, stride), _reads_words, _add_pairs)


@intrinsic  # type: ignore[misc]
def _by_halves(
    typing: Any, count: Any, x: Any, pairs: Any, words: Any, y: Any, stride: Any
) -> Any:  # fmt: skip
    """The same of rows of `2 * pairs` float32 each."""
    return for_panels((count, x, pairs, words, y, stride), _reads_words, add_halves)


def for_panels(kinds: tuple[Any, ...], reads: Any, add: Any) -> Any:
    """Signature and code of an intrinsic: for each count of rows code of its own. `reads` makes a
    function of a panel that answers the words of a pair of inputs, which `add` multiplies."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, x, pairs, weights, y, stride = pointers(context, builder, signature, args)
        words_of = reads(builder, weights, pairs)

        def emit(rows: int) -> None:
            zero = ir.Constant(FLOATS, None)
            sums = [
                [cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)]
                for _ in range(rows)
            ]
            with cgutils.for_range(builder, pairs) as loop:
                add(builder, sums, x, words_of(loop.index), loop.index, pairs)
            _store(builder, sums, y, stride)

        each_count(builder, count, ROWS_AT_ONCE, emit)
        return context.get_dummy_value()

    return types.void(*kinds), generate


def _reads_words(builder: Any, words: Any, _: Any) -> Any:
    """The next ones are asked for."""
    words, tiles = builder.bitcast(words, INTS.as_pointer()), Tiles(builder)

    def read(pair: Any) -> list[Any]:
        first = builder.mul(pair, ir.Constant(pair.type, VECTORS))
        for vector in range(VECTORS):
            tiles.fetch(tiles.place(words, first, _FAR * VECTORS + vector), near=False)
            tiles.fetch(tiles.place(words, first, _NEAR * VECTORS + vector))
        places = [builder.add(first, ir.Constant(pair.type, vector)) for vector in range(VECTORS)]
        return [builder.load(builder.gep(words, [at]), align=4) for at in places]

    return read


def _add_pairs(builder: Any, sums: Any, x: Any, words: Any, pair: Any, pairs: Any) -> None:
    weights = [builder.bitcast(raw, PAIRS) for raw in words]
    for row, totals in enumerate(sums):
        at = builder.add(builder.mul(pairs, ir.Constant(pair.type, row)), pair)
        factor = builder.bitcast(spread(builder, builder.load(builder.gep(x, [at]))), PAIRS)
        for total, weight in zip(totals, weights, strict=True):
            added = multiply_add(builder, builder.load(total), factor, weight)
            builder.store(added, total)


def add_halves(builder: Any, sums: Any, x: Any, words: Any, pair: Any, pairs: Any) -> None:
    emit, halves = Emit(builder), [halves_of(builder, each) for each in words]
    width = builder.mul(pairs, ir.Constant(pair.type, 2))
    for half, weights in enumerate(zip(*halves, strict=True)):
        column = emit.at(pair, 0, 2, half)
        for row, totals in enumerate(sums):
            at = builder.add(builder.mul(width, ir.Constant(pair.type, row)), column)
            factor = emit.spread(x, at)
            for total, weight in zip(totals, weights, strict=True):
                emit.add_product(total, factor, weight)


def halves_of(builder: Any, words: Any) -> list[Any]:
    """Bits of the first and the second number of each pair in float32."""
    low, high = (ir.Constant(INTS, [n] * LANES) for n in (LANES, 0xFFFF0000))
    return [builder.shl(words, low), builder.and_(words, high)]


def _store(builder: Any, sums: Any, y: Any, stride: Any) -> None:
    for row, totals in enumerate(sums):
        for vector, total in enumerate(totals):
            first = ir.Constant(stride.type, vector * LANES)
            at = builder.add(builder.mul(stride, ir.Constant(stride.type, row)), first)
            place = builder.bitcast(builder.gep(y, [at]), FLOATS.as_pointer())
            builder.store(builder.load(total), place, align=4)


def multiply_add(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """Each lane of `total` and the two products of its pairs."""
    add = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    return builder.call(add, [total, one, other])


def spread(builder: Any, word: Any) -> Any:
    """One word in every lane."""
    nothing = ir.Constant(INTS, ir.Undefined)
    single = builder.insert_element(nothing, word, ir.Constant(INT, 0))
    return builder.shuffle_vector(single, nothing, ir.Constant(INTS, [0] * LANES))


@fast
def product(x: Any, space: Any, words: Any, y: Any) -> None:
    """`x` float32 `[rows, in]`, rounded into `space` uint32 `[rows, in / 2]`; `words` of `pack`;
    `y` float32 `[rows, padded(out)]`: y = x W'."""
    for row in range(x.shape[0]):
        _round(x[row], space[row])
    product_of_pairs(space, words, y)


@fast
def product_of_pairs(x: Any, words: Any, y: Any) -> None:
    """The same of rows that are rounded: `x` uint32 `[rows, in / 2]`."""
    if HAS_TILES and x.shape[1] % SIDE == 0:
        product_of_tiles(x, words, y)
    elif SLOW_PAIRS:
        by_halves(x, words, y)
    else:
        by_pairs(x, words, y)


@fast
def by_pairs(x: Any, words: Any, y: Any) -> None:
    """As many rows at once as follow from equal parts: one row alone would wait for its sums."""
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    parts = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    for panel in range(words.shape[0]):
        mine, first = words[panel], panel * PANEL
        row = 0
        for part in range(parts, 0, -1):
            some = (rows - row + part - 1) // part
            _by_pairs(some, x[row], pairs, mine, y[row, first:], stride)
            row += some


@fast
def by_halves(x: Any, words: Any, y: Any) -> None:
    """The same, with pairs taken apart."""
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    parts = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    apart = taken_apart(x)
    for panel in range(words.shape[0]):
        mine, first = words[panel], panel * PANEL
        row = 0
        for part in range(parts, 0, -1):
            some = (rows - row + part - 1) // part
            _by_halves(some, apart[row], pairs, mine, y[row, first:], stride)
            row += some


@fast
def taken_apart(x: Any) -> Any:
    """Pairs of bfloat16 as pairs of float32."""
    rows, pairs = x.shape
    found = np.empty((rows, 2 * pairs), np.float32)
    low, high = np.uint64(0xFFFF), np.uint64(0xFFFF0000)
    for row in range(rows):
        mine, out = x[row], found[row].view(np.uint64)
        for i in range(pairs):
            pair = np.uint64(mine[i])
            out[i] = (pair & low) << np.uint64(16) | (pair & high) << np.uint64(32)
    return found


@fast
def _round(row: Any, out: Any) -> None:
    """float32 to pairs of bfloat16, to nearest, ties to even."""
    bits = row.view(np.uint32)
    one, half, low = np.uint32(1), np.uint32(0x7FFF), np.uint32(16)
    for i in range(out.shape[0]):
        a, b = bits[2 * i], bits[2 * i + 1]
        a = (a + half + ((a >> low) & one)) >> low
        b = (b + half + ((b >> low) & one)) >> low
        out[i] = a | (b << low)
