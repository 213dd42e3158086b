"""Vector products of rows with packed weights (`engine.cpu.weights.pack`).

Each output is summed over the inputs in order, one float32 multiply-add at a time, so a row's
result is bit-identical for any number of rows in the product. (Usual kernels change the order of
summation with the number of rows; He et al., "Defeating Nondeterminism in LLM Inference", 2025.)
Weights are prefetched, because hardware prefetchers do not cross pages.

int8 weights are widened, which is exact, and each output's sum is multiplied by its scale. In
bfloat16, rows are rounded first, then multiplied as tiles with AMX (`engine.cpu.kernels_tiles`), as
pairs on AMD, whose instruction for pairs does twice as many products per second as float32
arithmetic, and as float32 on Intel, whose instruction does half as many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from engine.cpu.jit import HAS_TILES, fast, fast_in_place
from engine.cpu.kernels_tiles import SIDE, TAIL, product_of_codes, product_of_tiles, room
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

VECTORS = PANEL // LANES  # per panel
ROWS_AT_ONCE = 10 if HAS_AVX512 else 2  # rows whose sums of a panel fit in registers
# Panels read at once for 1, 2, ... rows, limited by registers for their sums: memory is read faster
# at several places. For words multiplied as pairs, and for others.
_OF_PAIRS, _OF_OTHERS = np.array([4, 4, 3, 3, 2, 2]), np.array([2] * (5 if HAS_AVX512 else 1))
BY_PAIRS = MULTIPLIES_PAIRS and not SLOW_PAIRS
# Prefetch distances in pairs, (long panels, others): into L2, into L1; for one panel read at a
# time, then for several. A panel of more than _LONG pairs is long.
_AHEAD, _LONG = (((64, 64), (8, 8)), ((16, 32), (4, 8))), 320
_BEHIND = 16  # padding per row: without it, long rows fall into the same set of the L1 cache


@intrinsic  # type: ignore[misc]
def _panels(
    typing: Any, way: Any, x: Any, row: Any, words: Any, panel: Any, y: Any, sizes: Any
) -> Any:
    """Compute the outputs of `panel` for rows of `x` from `row` on. `way` n <= ROWS_AT_ONCE: n
    rows, one panel; ROWS_AT_ONCE + n: n rows, all panels that n rows read at once. `sizes`: stride
    of `x`, pairs, stride of `y`, and panels between two that are read at once. `x` is float32, or
    words of two bfloat16 multiplied as pairs. (Offsets, not slices: numba would count slices'
    references.)"""
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
            emit.prefetch(words, emit.at(far, 0, size, vector), near=False)
            emit.prefetch(words, emit.at(near, 0, size, vector), near=True)
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


@fast_in_place
def by_vectors(x: Any, pairs: Any, words: Any, y: Any) -> None:
    """Compute y = x W'. `x` has `pairs` pairs of float32, or words of two bfloat16, per row; `y`
    float32 `[rows, panels * PANEL]`; `words` may be int8, whose scales are not applied."""
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
    product_of_codes(as_words(x), codes, room(x.shape[1] // 2, PANEL), y)


@fast
def _product_of_int8(x: Any, codes: Any, y: Any) -> None:
    pairs = x.shape[1] // 2
    if HAS_TILES and pairs % SIDE == 0:
        product_of_codes(as_words(x), codes, room(pairs, PANEL), y)
    elif BY_PAIRS:
        by_vectors(as_words(x), pairs, codes, y)
    else:
        by_vectors(rounded_rows(x), pairs, codes, y)
    scales, first = codes.view(np.float32), pairs * PANEL // 2
    for row in range(len(x)):
        for panel in range(len(codes)):
            outputs, scale = y[row, panel * PANEL :], scales[panel, first:]
            for i in range(PANEL):
                outputs[i] *= scale[i]


def product(x: Any, weights: Any, rounded: Any, y: Any) -> None:
    """Compute y = x W'. `x` float32 `[rows, in]`; `weights` in any form of `engine.cpu.weights`;
    `y` float32 `[rows, padded(out)]`. `rounded`: round rows to bfloat16, which codes always do.
    Compiled code chooses by type, so that unused forms are not compiled: the form by the dtype of
    `weights`, rounding by a tuple, () or (0,)."""
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
    """Return float32 rows as words of two bfloat16 each, the first in the low half."""
    rows, pairs = x.shape[0], x.shape[1] // 2
    words, whole = room(rows, pairs).view(np.uint32), pairs // LANES * LANES
    bits = x.view(np.uint32)
    for row in range(rows):
        keep(x, row * x.shape[1], words, row * pairs, whole, words)
        for i in range(whole, pairs):
            low, high = upper_half(bits[row, 2 * i]), upper_half(bits[row, 2 * i + 1])
            words[row, i] = (low >> np.uint32(16)) | high
    return words


@intrinsic  # type: ignore[misc]
def keep(typing: Any, x: Any, first: Any, out: Any, at: Any, count: Any, kind: Any) -> Any:
    """Convert float32 numbers `x[first:]` to `count` elements `out[at:]` of the dtype of `kind`,
    float32 or words. `count` is a multiple of LANES; arrays are contiguous."""
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
    """Return float32 rows rounded to bfloat16, still as float32, with `_BEHIND` padding."""
    rows, width = x.shape
    found = np.empty((rows, width + _BEHIND), np.float32)
    for row in range(rows):
        bits, out = x[row].view(np.uint32), found[row].view(np.uint32)
        for i in range(width):
            out[i] = upper_half(bits[i])
    return found


@fast
def upper_half(bits: Any) -> Any:
    """Round float32 bits to bfloat16 in the upper half of the word: to nearest, ties to even. NaN
    stays NaN."""
    low = (bits >> np.uint32(16)) & np.uint32(1)
    number = (bits + np.uint32(0x7FFF) + low) & np.uint32(0xFFFF0000)
    return np.uint32(0x7FC00000) if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else number
