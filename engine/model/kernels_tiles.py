"""Products of rows in bfloat16, for processors that multiply tiles of it (AMX).

One instruction takes sixteen pairs of inputs of up to sixteen rows for sixteen outputs, so that so
many rows take as long as reading the weights for one does, from memory or from the caches. Weights
are packed as `engine.model.kernels_bfloat16` has them, and asked for ahead of their use: processors
foresee no page but the present one. A row's sums run over the inputs in order whoever its
neighbours are, so its result is the same to the bit in any company, though not that of pairs: a
pair's two products are added to each other last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.attention.vectors import pointers
from engine.jit import fast

SIDE = 16  # rows of a tile, and words in a row of it
_AHEAD = 2048  # bytes; nothing is read that the processor may not read
_SUMS, _ROWS, _WEIGHTS = (0, 1), 2, (3, 4)  # tiles; two of weights lie side by side in a panel
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
    """Tiles of so many rows for sums and inputs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.Constant(_LONG, SIDE)
        shapes = dict.fromkeys((*_SUMS, _ROWS), (args[0], whole))
        Tiles(builder).shape({**shapes, **dict.fromkeys(_WEIGHTS, (whole, whole))})
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[misc]
def end_of_tiles(typing: Any) -> Any:
    """Nothing of the tiles needs to be kept when another thread has its turn."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Tiles(builder)("x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _panel(*, first: bool) -> Any:
    """A function of compiled code: a panel's outputs of the rows of a tile. The first rows ask for
    the weights that come next."""

    @intrinsic  # type: ignore[misc]
    def panel(typing: Any, x: Any, pairs: Any, words: Any, y: Any, stride: Any) -> Any:
        """`x` rows of `pairs` words each, a multiple of SIDE; `words` one panel; `y` float32, rows
        `stride` apart."""
        whole = types.int64
        signature = types.void(x, whole, words, y, whole)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, pairs, words, y, stride = pointers(context, builder, signature, args)
            _emit_panel(builder, (x, words, y), pairs, stride, first=first)
            return context.get_dummy_value()

        return signature, generate

    return panel


def _emit_panel(builder: Any, arrays: Any, pairs: Any, stride: Any, *, first: bool) -> None:
    (x, words, y), emit, zero = arrays, Tiles(builder), ir.Constant(_LONG, 0)
    across, row, out = (
        builder.mul(words_in_row, ir.Constant(_LONG, 4))
        for words_in_row in (ir.Constant(_LONG, 2 * SIDE), pairs, stride)
    )
    for tile in _SUMS:
        emit("x86.tilezero", tile)
    step = ir.Constant(_LONG, SIDE)
    with cgutils.for_range_slice(builder, zero, pairs, step, _LONG) as (pair, _):
        start = builder.mul(pair, ir.Constant(_LONG, 2 * SIDE))
        if first:
            for line in range(2 * SIDE):
                emit.fetch(emit.place(words, start, _AHEAD // 4 + line * SIDE))
        emit("x86.tileloadd64", _ROWS, emit.place(x, pair), row)
        for side, (total, tile) in enumerate(zip(_SUMS, _WEIGHTS, strict=True)):
            emit("x86.tileloadd64", tile, emit.place(words, start, side * SIDE), across)
            emit("x86.tdpbf16ps", total, _ROWS, tile)
    for side, total in enumerate(_SUMS):
        emit("x86.tilestored64", total, emit.place(y, zero, side * SIDE), out)


_first, more_rows = _panel(first=True), _panel(first=False)


@fast
def product_of_tiles(x: Any, words: Any, y: Any) -> None:
    """As `kernels_bfloat16.product_of_pairs`, of a multiple of SIDE pairs."""
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    if rows == 0:
        return
    begin_tiles(min(rows, SIDE))
    for panel in range(words.shape[0]):
        mine, at = words[panel], panel * words.shape[2]
        _first(x, pairs, mine, y[0, at:], stride)
        for row in range(SIDE, rows, SIDE):
            row = min(row, rows - SIDE)  # some rows once more instead of tiles of another height
            more_rows(x[row:], pairs, mine, y[row, at:], stride)
    end_of_tiles()
