"""Products of rows with packed weights by vectors (`engine.cpu.weights.pack`).

Each output is the sum over the inputs in order, one multiply-add at a time in float32, whoever the
neighbours are: a row's result is the same to the bit however many rows share the product. (The
usual kernels choose another order of summation for another number of rows; He et al., "Defeating
Nondeterminism in LLM Inference", 2025.) The inner loop is written as LLVM vectors, since no loop
over an array keeps its sums in registers. Weights are asked for ahead of their use: processors
foresee no page but the present one.

Weights in int8 are half the bytes. They are widened, which is exact, and an output's scale joins
its sum. In bfloat16 rows are rounded first. AMX multiplies tiles (`engine.cpu.kernels_tiles`). Else
one instruction takes pairs of inputs (AVX512_BF16): on AMD's processors it makes twice as many
products a second as float32 arithmetic, on Intel's half as many, so there rows and weights are
multiplied as float32, which is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from engine.cpu.jit import HAS_TILES, fast
from engine.cpu.kernels_tiles import SIDE, TAIL, product_of_codes, product_of_tiles
from engine.cpu.vectors import (
    FLOATS,
    HAS_AVX512,
    INTS,
    LANES,
    MULTIPLIES_PAIRS,
    PANEL,
    SLOW_PAIRS,
    WIDE,
    Emit,
    each_count,
    pointers,
)

VECTORS = PANEL // LANES  # of a panel
ROWS_AT_ONCE = 10 if HAS_AVX512 else 2  # whose sums of a panel are registers
# Panels that one row, two, ... read at once, as far as registers hold their sums: memory is read
# faster at several places. Of words multiplied as pairs, of others.
_OF_PAIRS, _OF_OTHERS = np.array([4, 4, 3, 3, 2, 2]), np.array([2] * (5 if HAS_AVX512 else 1))
BY_PAIRS = MULTIPLIES_PAIRS and not SLOW_PAIRS
# Pairs asked for ahead of their turn, of long panels and of others: to the second cache, to the
# first. Of one panel; of each of some.
_AHEAD, _LONG = (((64, 64), (8, 8)), ((16, 32), (4, 8))), 320
_BEHIND = 16  # numbers behind a row: else long rows share a set of the first cache


@intrinsic  # type: ignore[misc]
def _panels(
    typing: Any, way: Any, x: Any, row: Any, words: Any, panel: Any, y: Any, sizes: Any
) -> Any:
    """The outputs of `panel` for rows of `x` from `row` on. `way`: how many rows, up to
    ROWS_AT_ONCE; beyond, so many more, and of all panels that these read at once. `sizes`: numbers
    from a row of `x` to the next, pairs, numbers from a row of `y` to the next, panels from one
    that is read at once to the next. `x` is float32, or words of two bfloat16, multiplied as pairs.
    (Slices as arguments would be counted.)"""
    whole = types.int64
    signature = types.void(whole, x, whole, words, whole, y, sizes)
    as_pairs, coded = x.dtype != types.float32, words.dtype == types.int8
    ways = [(n, 1) for n in range(1, ROWS_AT_ONCE + 1)]
    ways += enumerate((_OF_PAIRS if as_pairs and not coded else _OF_OTHERS).tolist(), 1)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        way, x, row, words, panel, y, sizes = pointers(context, builder, signature, args)
        apart, pairs, stride, step = cgutils.unpack_tuple(builder, sizes)
        emit, x = Emit(builder, pairs=as_pairs), builder.gep(x, [builder.mul(row, apart)])
        size = emit.at(pairs, 0, 2 * PANEL, TAIL) if coded else emit.at(pairs, 0, PANEL)
        y = builder.gep(y, [builder.add(builder.mul(row, stride), emit.at(panel, 0, PANEL))])
        words, gap = builder.gep(words, [builder.mul(panel, size)]), builder.mul(step, size)
        arrays, sizes = (x, words, y), (apart, pairs, stride, gap, emit.at(step, 0, PANEL))
        each_count(
            builder, way, len(ways), lambda n: _emit(emit, *ways[n - 1], arrays, sizes, coded)
        )
        return context.get_dummy_value()

    return signature, generate


def _emit(emit: Emit, rows: int, count: int, arrays: Any, sizes: Any, coded: bool) -> None:
    (x, words, y), (apart, pairs, stride, gap, outputs), builder = arrays, sizes, emit.builder
    zero, size = ir.Constant(FLOATS, None), 2 * PANEL if coded else PANEL
    nth = [ir.Constant(WIDE, n) for n in range(count)]
    streams = [builder.gep(words, [builder.mul(gap, n)]) for n in nth]
    vectors = [(s, v * LANES) for s in streams for v in range(VECTORS)]
    places = [emit.at(builder.mul(outputs, n), v * LANES) for n in nth for v in range(VECTORS)]
    is_long = builder.icmp_signed(">", pairs, ir.Constant(WIDE, _LONG))
    ahead = [[ir.Constant(WIDE, far) for far in both] for both in _AHEAD[count > 1]]
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in vectors] for _ in range(rows)]
    with cgutils.for_range(builder, pairs, intp=WIDE) as loop:
        far, near = (builder.add(loop.index, builder.select(is_long, *both)) for both in ahead)
        for words, vector in vectors if not coded else vectors[::VECTORS]:  # a line each
            emit.fetch(words, emit.at(far, 0, size, vector), near=False)
            emit.fetch(words, emit.at(near, 0, size, vector), near=True)
        here = [(w, emit.at(loop.index, 0, size, v)) for w, v in vectors]
        if coded and emit.pairs:
            read = [words for place in here[::VECTORS] for words in emit.looked_up(*place)]
        elif coded:
            halves = [emit.widened(*place) for place in here]
        else:
            read = [emit.load(*place, INTS) for place in here]
            halves = [emit.halves(words) for words in read]
        parts = [read] if emit.pairs else [list(half) for half in zip(*halves, strict=True)]
        for part, weights in enumerate(parts):
            column = emit.at(loop.index, 0, len(parts), part)
            for row, totals in enumerate(sums):
                at = builder.add(builder.mul(apart, ir.Constant(WIDE, row)), column)
                factor = emit.spread(x, at)
                for total, weight in zip(totals, weights, strict=True):
                    emit.add_product(total, factor, weight)
    for row, totals in enumerate(sums):
        first = builder.mul(stride, ir.Constant(WIDE, row))
        for place, total in zip(places, totals, strict=True):
            emit.store(builder.load(total), y, builder.add(first, place))


@fast
def by_vectors(x: Any, pairs: Any, words: Any, y: Any) -> None:
    """`x` rows of so many pairs of float32 or words of two bfloat16; `y` float32
    `[rows, panels * PANEL]`; `words` or int8, without their scales."""
    rows, panels = x.shape[0], words.shape[0]
    counts = _OF_PAIRS if x.shape[1] == pairs and words.itemsize == 4 else _OF_OTHERS
    parts = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    count = counts[rows - 1] if 0 < rows <= len(counts) else panels + 1
    step, done = panels // count, panels // count * count
    sizes = x.shape[1], pairs, y.shape[1], step
    for panel in range(step):
        _panels(ROWS_AT_ONCE + rows, x, 0, words, panel, y, sizes)
    for panel in range(done, panels):
        row = 0
        for part in range(parts):
            some = (rows - row) // (parts - part)
            _panels(some, x, row, words, panel, y, sizes)
            row += some


@fast
def _product_of_floats(x: Any, words: Any, y: Any) -> None:
    by_vectors(x, x.shape[1] // 2, words, y)


@fast
def _product_of_words(x: Any, words: Any, y: Any) -> None:
    pairs = x.shape[1] // 2
    if HAS_TILES and pairs % SIDE == 0:
        product_of_tiles(as_words(x), words, y)
    elif BY_PAIRS:
        by_vectors(as_words(x), pairs, words, y)
    else:
        by_vectors(rounded_rows(x), pairs, words, y)


@fast
def _product_of_codes(x: Any, codes: Any, y: Any) -> None:
    product_of_codes(as_words(x), codes, y)


@fast
def _product_of_int8(x: Any, codes: Any, y: Any) -> None:
    pairs = x.shape[1] // 2
    if HAS_TILES and pairs % SIDE == 0:
        product_of_codes(as_words(x), codes, y)
    elif BY_PAIRS:
        by_vectors(as_words(x), pairs, codes, y)
    else:
        by_vectors(rounded_rows(x), pairs, codes, y)
    scales, first = codes.view(np.float32), pairs * PANEL // 2
    for row in range(len(x)):
        for panel in range(len(codes)):
            mine, scale = y[row, panel * PANEL :], scales[panel, first:]
            for i in range(PANEL):
                mine[i] *= scale[i]


def product(x: Any, weights: Any, rounded: Any, y: Any) -> None:
    """y = x W'. `x` float32 `[rows, in]`; `weights` of any of `engine.cpu.weights`' forms; `y`
    float32 `[rows, padded(out)]`. `rounded`: in bfloat16, as codes always are. Compiled code knows
    the form by the type of a number, and whether rows are rounded by a tuple, () or (0,): what a
    model does not use is not compiled."""
    _of(weights.dtype, bool(rounded))(x, weights, y)


def _of(kind: Any, rounded: bool) -> Any:
    of_words = _product_of_words if rounded else _product_of_floats
    of_codes = _product_of_int8 if str(kind) == "int8" else _product_of_codes
    return of_words if str(kind) == "uint32" else of_codes


@overload(product)  # type: ignore[misc]
def _product(x: Any, weights: Any, rounded: Any, y: Any) -> Any:
    chosen = _of(weights.dtype, len(rounded) > 0)

    def call(x: Any, weights: Any, rounded: Any, y: Any) -> None:
        chosen(x, weights, y)

    return call


@fast
def as_words(x: Any) -> Any:
    """Rows of float32 as words of two bfloat16, the first in the low half."""
    rows, pairs = x.shape[0], x.shape[1] // 2
    words, whole = np.empty((rows, pairs), np.uint32), pairs // LANES * LANES
    for row in range(rows):
        keep(x, row * x.shape[1], words, row * pairs, whole, words)
        bits, out = x[row].view(np.uint32), words[row]
        for i in range(whole, pairs):
            out[i] = (upper_half(bits[2 * i]) >> np.uint32(16)) | upper_half(bits[2 * i + 1])
    return words


@intrinsic  # type: ignore[misc]
def keep(typing: Any, x: Any, first: Any, out: Any, at: Any, count: Any, kind: Any) -> Any:
    """The float32 from `first` on, as `count` of what an array of that `kind` holds, float32 or
    words, in `out` from `at` on. A multiple of LANES; of arrays without gaps."""
    whole = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, first, out, at, count, _ = pointers(context, builder, signature, args)
        emit, x, out = Emit(builder), builder.gep(x, [first]), builder.gep(out, [at])
        zero, step = ir.Constant(WIDE, 0), ir.Constant(WIDE, LANES)
        with cgutils.for_range_slice(builder, zero, count, step, WIDE) as (i, _):
            if kind.dtype == types.float32:
                emit.store(emit.load(x, i), out, i)
            else:
                low, high = (emit.load(x, emit.at(i, 0, 2, j)) for j in (0, LANES))
                emit.store(emit.rounded(low, high), out, i)
        return context.get_dummy_value()

    return types.void(x, whole, out, whole, whole, kind), generate


@fast
def rounded_rows(x: Any) -> Any:
    """Rows of float32 as what bfloat16 keeps of them."""
    rows, width = x.shape
    found = np.empty((rows, width + _BEHIND), np.float32)
    for row in range(rows):
        bits, out = x[row].view(np.uint32), found[row].view(np.uint32)
        for i in range(width):
            out[i] = upper_half(bits[i])
    return found


@fast
def upper_half(bits: Any) -> Any:
    """Of a float32 to bfloat16, to nearest, ties to even, in the upper half of the word. A NaN
    stays one."""
    low = (bits >> np.uint32(16)) & np.uint32(1)
    number = (bits + np.uint32(0x7FFF) + low) & np.uint32(0xFFFF0000)
    return np.uint32(0x7FC00000) if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else number
