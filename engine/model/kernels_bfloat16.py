"""Products of a few rows in bfloat16, for processors that multiply pairs of it (AVX512_BF16).

One instruction takes a pair of inputs for sixteen outputs and adds to float32 sums, twice as many
products as float32 arithmetic does, so that eight rows take about as long as reading the weights
for one (float32: four, see `engine.model.kernels`). Rows are rounded to bfloat16 first, as
everywhere in that precision. A row's sums run over the inputs in order whoever its neighbours
are, so its result is the same to the bit in any company.
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

from engine.attention.vectors import FLOATS, INT, INTS, LANES, PAIRS, pointers
from engine.jit import HAS_TILES, fast
from engine.model.kernels_tiles import SIDE, product_of_tiles

VECTORS = 2  # in a panel: ten rows' sums fill most of the registers
PANEL = LANES * VECTORS
ROWS_AT_ONCE = 10  # beyond, compiled code runs out of registers

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


def _panel(rows: int) -> Any:
    """A function of compiled code: `PANEL` outputs of `rows` rows."""

    @intrinsic  # type: ignore[misc]
    def panel(typing: Any, x: Any, pairs: Any, words: Any, y: Any, stride: Any) -> Any:
        """`x` rows of `pairs` words each; `words` one panel; `y` float32, rows `stride` apart."""
        signature = types.void(x, pairs, words, y, stride)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, pairs, words, y, stride = pointers(context, builder, signature, args)
            _emit_panel(builder, rows, (x, words, y), pairs=pairs, stride=stride)
            return context.get_dummy_value()

        return signature, generate

    return panel


def _emit_panel(builder: Any, rows: int, arrays: Any, *, pairs: Any, stride: Any) -> None:
    x, words, y = arrays
    words = builder.bitcast(words, INTS.as_pointer())
    zero = ir.Constant(FLOATS, None)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)] for _ in range(rows)]
    with cgutils.for_range(builder, pairs) as loop:
        kind = loop.index.type
        first = builder.mul(loop.index, ir.Constant(kind, VECTORS))
        places = [builder.add(first, ir.Constant(kind, vector)) for vector in range(VECTORS)]
        raw = [builder.load(builder.gep(words, [at]), align=4) for at in places]
        weights = [builder.bitcast(vector, PAIRS) for vector in raw]
        for row in range(rows):
            at = builder.add(builder.mul(pairs, ir.Constant(kind, row)), loop.index)
            word = spread(builder, builder.load(builder.gep(x, [at])))
            factor = builder.bitcast(word, PAIRS)
            for total, weight in zip(sums[row], weights, strict=True):
                added = multiply_add(builder, builder.load(total), factor, weight)
                builder.store(added, total)
    for row in range(rows):
        for vector, total in enumerate(sums[row]):
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


_one, _two, _three, _four, _five, _six, _seven, _eight, _nine, _ten = (
    _panel(rows) for rows in range(1, ROWS_AT_ONCE + 1)
)


@fast
def product(x: Any, space: Any, words: Any, y: Any) -> None:
    """`x` float32 `[rows, in]`, rounded into `space` uint32 `[rows, in / 2]`; `words` of `pack`;
    `y` float32 `[rows, padded(out)]`: y = x W'."""
    for row in range(x.shape[0]):
        _round(x[row], space[row])
    product_of_pairs(space, words, y)


@fast
def product_of_pairs(x: Any, words: Any, y: Any) -> None:
    """The same of rows that are rounded: `x` uint32 `[rows, in / 2]`. As many at once as follow
    from equal parts: one row alone would wait for its sums."""
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    if HAS_TILES and pairs % SIDE == 0:
        product_of_tiles(x, words, y)
        return
    parts = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    for panel in range(words.shape[0]):
        mine, first = words[panel], panel * PANEL
        row = 0
        for part in range(parts, 0, -1):
            some = (rows - row + part - 1) // part
            _some(some, x[row], pairs, mine, y[row, first:], stride)
            row += some


@fast
def _some(count: Any, rows: Any, pairs: Any, words: Any, sums: Any, stride: Any) -> None:
    if count == 1:
        _one(rows, pairs, words, sums, stride)
    elif count == 2:
        _two(rows, pairs, words, sums, stride)
    elif count == 3:
        _three(rows, pairs, words, sums, stride)
    elif count == 4:
        _four(rows, pairs, words, sums, stride)
    elif count == 5:
        _five(rows, pairs, words, sums, stride)
    elif count == 6:
        _six(rows, pairs, words, sums, stride)
    elif count == 7:
        _seven(rows, pairs, words, sums, stride)
    elif count == 8:
        _eight(rows, pairs, words, sums, stride)
    elif count == 9:
        _nine(rows, pairs, words, sums, stride)
    else:
        _ten(rows, pairs, words, sums, stride)


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
