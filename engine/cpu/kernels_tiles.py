"""Products of rows in bfloat16, for processors that multiply tiles of it (AMX).

One instruction takes sixteen pairs of inputs of up to sixteen rows for sixteen outputs, so that so
many rows take as long as reading the weights for one does, from memory or from the caches; of more
rows, two tiles share what was loaded. Weights are packed as `engine.cpu.kernels_bfloat16` has
them, and asked for ahead of their use: processors foresee no page but the present one. A row's sums
run over the inputs in order whoever its neighbours are, so its result is the same to the bit in any
company, though not that of pairs: a pair's two products are added to each other last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast
from engine.cpu.vectors import pointers

SIDE = 16  # rows of a tile, and words in a row of it
_AHEAD = 512  # words that few rows ask ahead, more than _FEW twice as many: a step takes longer
_FEW = 8
SUMS, ROWS, WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)  # tiles; a panel is two of weights wide
_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_PLACE = _BYTE.as_pointer()


class Tiles:
    """Instructions on tiles at one place of a function."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def __call__(self, name: str, *arguments: Any) -> None:
        """Of LLVM's for this processor. Ints are numbers of tiles, as part of the instruction."""
        given = [ir.Constant(_BYTE, a) if isinstance(a, int) else a for a in arguments]
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in given])
        called = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}")
        self.builder.call(called, given)

    def place(self, array: Any, index: Any, more: int = 0) -> Any:
        """Of an element of the array."""
        at = self.builder.add(index, ir.Constant(_LONG, more))
        return self.builder.bitcast(self.builder.gep(array, [at]), _PLACE)

    def fetch(self, place: Any, *, near: bool = True) -> None:
        """Ask for a cache line: to the first cache, or to the second only (not `near`)."""
        how = (0, 3 if near else 2, 1)  # to read, where to, data
        self("prefetch.p0i8", place, *(ir.Constant(_INT, n) for n in how))

    def shape(self, shapes: Mapping[int, tuple[Any, Any]]) -> None:
        """Give tiles so many rows of so many words, both int64. What follows is the thread's until
        `end_of_tiles`."""
        builder = self.builder
        facts = cgutils.alloca_once(builder, _BYTE, size=64)
        cgutils.memset(builder, facts, ir.Constant(_LONG, 64), 0)
        builder.store(ir.Constant(_BYTE, 1), facts)  # the one palette there is
        for tile, (rows, words) in shapes.items():
            place = builder.gep(facts, [ir.Constant(_LONG, 16 + 2 * tile)])
            width = builder.trunc(builder.mul(words, ir.Constant(_LONG, 4)), _SHORT)
            builder.store(width, builder.bitcast(place, _SHORT.as_pointer()))
            place = builder.gep(facts, [ir.Constant(_LONG, 48 + tile)])
            builder.store(builder.trunc(rows, _BYTE), place)
        self("x86.ldtilecfg", facts)


@intrinsic  # type: ignore[misc]
def begin_tiles(typing: Any, rows: Any) -> Any:
    """Sums and inputs of so many rows, for one tile of rows or two."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.Constant(_LONG, SIDE)
        shapes = dict.fromkeys((*SUMS[0], *SUMS[1], *ROWS), (args[0], whole))
        Tiles(builder).shape({**shapes, **dict.fromkeys(WEIGHTS, (whole, whole))})
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[misc]
def end_of_tiles(typing: Any) -> Any:
    """Nothing of the tiles needs to be kept when another thread has its turn."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Tiles(builder)("x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _panel(tiles: int, *, first: bool) -> Any:
    """A function of compiled code: a panel's outputs of the rows of one tile or two, so that each
    weight is loaded once for both. The first rows ask for the weights that come next."""

    @intrinsic  # type: ignore[misc]
    def panel(
        typing: Any, x: Any, row: Any, pairs: Any, words: Any, start: Any, y: Any, to: Any,
        stride: Any, second: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        """Rows of `x` from `row` on, of `pairs` words each, a multiple of SIDE; one panel is
        `words[start:]`; `y[row, to:]` float32, rows `stride` apart. The second tile begins `second`
        rows below the first. Weights are asked for `ahead` words ahead; nothing is read that the
        processor may not read. (Slices as arguments would be counted, which takes longer.)"""
        whole = types.int64
        signature = types.void(x, whole, whole, words, whole, y, whole, whole, whole, whole)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = pointers(context, builder, signature, args)
            x, row, pairs, words, start, y, to, stride, second, ahead = given
            words, y = builder.gep(words, [start]), builder.gep(y, [to])
            rows = [row, builder.add(row, second)][:tiles]
            xs = [builder.gep(x, [builder.mul(row, pairs)]) for row in rows]
            ys = [builder.gep(y, [builder.mul(row, stride)]) for row in rows]
            arrays = (xs, words, ys)
            _emit_panel(builder, arrays, pairs, stride, ahead if first else None)
            return context.get_dummy_value()

        return signature, generate

    return panel


def _emit_panel(builder: Any, arrays: Any, pairs: Any, stride: Any, ahead: Any) -> None:
    (xs, words, ys), emit, zero = arrays, Tiles(builder), ir.Constant(_LONG, 0)
    across, row, out = (
        builder.mul(words_in_row, ir.Constant(_LONG, 4))
        for words_in_row in (ir.Constant(_LONG, 2 * SIDE), pairs, stride)
    )
    mine = list(zip(ROWS, SUMS, xs, ys, strict=False))  # of each tile of rows
    for _, sums, _, _ in mine:
        for total in sums:
            emit("x86.tilezero", total)
    step = ir.Constant(_LONG, SIDE)
    with cgutils.for_range_slice(builder, zero, pairs, step, _LONG) as (pair, _):
        start = builder.mul(pair, ir.Constant(_LONG, 2 * SIDE))
        if ahead is not None:
            later = builder.add(start, ahead)
            for line in range(2 * SIDE):
                emit.fetch(emit.place(words, later, line * SIDE))
        for rows, _, x, _ in mine:
            emit("x86.tileloadd64", rows, emit.place(x, pair), row)
        for side, tile in enumerate(WEIGHTS):
            emit("x86.tileloadd64", tile, emit.place(words, start, side * SIDE), across)
            for rows, sums, _, _ in mine:
                emit("x86.tdpbf16ps", sums[side], rows, tile)
    for _, sums, _, y in mine:
        for side, total in enumerate(sums):
            emit("x86.tilestored64", total, emit.place(y, zero, side * SIDE), out)


_first, _first_two = (_panel(tiles, first=True) for tiles in (1, 2))
more_rows, _more_two = (_panel(tiles, first=False) for tiles in (1, 2))


@fast
def product_of_tiles(x: Any, words: Any, y: Any) -> None:
    """As `kernels_bfloat16.product_of_pairs`, of a multiple of SIDE pairs."""
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    if rows == 0:
        return
    begin_tiles(min(rows, SIDE))
    ahead = _AHEAD if rows <= _FEW else 2 * _AHEAD
    for panel in range(words.shape[0]):
        start, to = panel * pairs * words.shape[2], panel * words.shape[2]
        if rows <= SIDE:
            _first(x, 0, pairs, words, start, y, to, stride, 0, ahead)
        else:
            more = min(SIDE, rows - SIDE)
            _first_two(x, 0, pairs, words, start, y, to, stride, more, ahead)
            rest(x, pairs, words, start, y, to, stride)
    end_of_tiles()


@fast
def rest(x: Any, pairs: Any, words: Any, start: Any, y: Any, to: Any, stride: Any) -> None:
    """A panel's outputs of the rows behind the first two tiles."""
    rows = x.shape[0]
    for row in range(2 * SIDE, rows - SIDE, 2 * SIDE):
        more = min(SIDE, rows - row - SIDE)
        _more_two(x, row, pairs, words, start, y, to, stride, more, 0)
    if rows > 2 * SIDE and (rows - 1) % (2 * SIDE) < SIDE:
        # some rows once more instead of a tile of another height
        more_rows(x, rows - SIDE, pairs, words, start, y, to, stride, 0, 0)


@fast
def room(rows: Any, words: Any) -> Any:
    """float32 `[rows, words]` from a border of cache lines on: a tile of rows that lie across two
    each takes six times as long to load."""
    space = np.empty(rows * words + SIDE, np.float32)
    first = -(space.ctypes.data // 4) % SIDE
    return space[first : first + rows * words].reshape(rows, words)
