"""Products of a few rows by vectors, with words of `engine.cpu.kernels_bfloat16` or codes of
`engine.cpu.kernels_codes`: where there are no tiles, or inputs are no whole ones.

Some panels are read at once, which lie far apart. A factor of a row that was loaded serves all of
them, and the fewer instructions stand between two lines of weights the farther a processor reads
ahead while it multiplies. Products with all matrices of a target of 302 M (586 MB, whose reading
takes 36 ms and whose arithmetic for eight rows 30), one thread of an Emerald Rapids, ms:

    rows                         1     8    10    12    16    24
    one panel of 32 outputs    38.7  49.3  51.8  69.0  80.0 109.4
    here                       36.4  42.1  45.3  48.1  62.7  90.5
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import HAS_TILES, fast
from engine.cpu.kernels_tiles import Tiles
from engine.cpu.vectors import (
    FLOATS,
    INTS,
    LANES,
    WIDE,
    Emit,
    each_count,
    halves_of,
    pointers,
)

WIDTH = 2 if HAS_TILES else 1  # vectors of a panel: tiles are loaded by two
PANEL = LANES * WIDTH
ROWS_AT_ONCE = 10 if HAS_TILES else 12  # beyond, compiled code runs out of registers
# Of a product of one row, two, ..., and of parts of one with more: panels that are read at once, of
# as many vectors as the registers hold sums of.
_STREAMS = tuple(max(1, vectors // WIDTH) for vectors in (4, 4, 4, 4, 4, 3, 3, 3))
_FEW = len(_STREAMS)
_OF_MANY = 2 // WIDTH
# Pairs of inputs whose weights are asked for before their turn, to the second cache if all rows are
# multiplied at once, and words to the first.
_FAR, _NEAR = 32, 8
_POINT = 16
BASES = 2  # rows of a panel of codes behind its weights: of each output, twice
_BYTES = ir.VectorType(ir.IntType(8), 2 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def _panels(streams: dict[int, int], *, all_rows: bool) -> Any:
    """A function of compiled code: outputs of some rows, each number of them with code of its own,
    of so many panels."""

    @intrinsic  # type: ignore[misc]
    def panels(
        typing: Any, count: Any, x: Any, row: Any, apart: Any, pairs: Any, weights: Any, at: Any,
        size: Any, y: Any, stride: Any, far: Any,
    ) -> Any:  # fmt: skip
        """`count` rows of `x` from `row` on, which lie `apart`, of so many pairs; the first panels
        of the tuple `at`, of `size` numbers each; `y` rows `stride` apart. `far`: how far
        behind a panel what follows it begins, in pairs, and how many of that are asked for at each
        pair's turn, with so many bits behind the point."""
        whole = types.int64
        signature = types.void(whole, x, whole, whole, whole, weights, at, whole, y, whole, far)
        kinds = (x.dtype == types.float32, weights.dtype == types.uint16)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = pointers(context, builder, signature, args)
            count, x, row, apart, pairs, weights, at, size, y, stride, far = given
            x, y = (
                builder.gep(array, [builder.mul(row, length)])
                for array, length in ((x, apart), (y, stride))
            )
            places, far = cgutils.unpack_tuple(builder, at), cgutils.unpack_tuple(builder, far)
            asked = partial(_far if all_rows else _slowly, far, pairs)

            def emit(rows: int) -> None:
                mine = places[: streams[rows]]
                sums = _sums(builder, rows, (x, weights), mine, (apart, pairs, size), kinds, asked)
                _store(builder, sums, y, mine, stride)

            each_count(builder, count, list(streams), emit)
            return context.get_dummy_value()

        return signature, generate

    return panels


_few = _panels(dict(enumerate(_STREAMS, 1)), all_rows=True)
_parts = range((ROWS_AT_ONCE + 1) // 2, ROWS_AT_ONCE + 1)
_many = _panels(dict.fromkeys(_parts, _OF_MANY), all_rows=False)


def _far(far: Any, pairs: Any, builder: Any, pair: Any) -> Any:
    """The pair of inputs whose weights are asked for at one's turn: some ahead, in what follows the
    panel."""
    then = builder.add(pair, ir.Constant(WIDE, _FAR))
    inside = builder.icmp_signed("<", then, pairs)
    return builder.select(inside, then, builder.add(then, far[0]))


def _slowly(far: Any, pairs: Any, builder: Any, pair: Any) -> Any:
    """The same for parts of the rows, all of which have their turns with a panel: each asks for its
    share of what follows, so that reading does not wait for the first part's next turn."""
    steps = builder.lshr(builder.mul(pair, far[1]), ir.Constant(WIDE, _POINT))
    return builder.add(builder.add(pairs, far[0]), steps)


def _sums(
    builder: Any, rows: int, arrays: Any, places: Any, lengths: Any, kinds: tuple[bool, bool],
    far: Any,
) -> list[list[Any]]:  # fmt: skip
    """Of each row, of each vector of the panels at these places."""
    (x, weights), (apart, pairs, size), (in_halves, in_codes) = arrays, lengths, kinds
    zero = ir.Constant(FLOATS, None)
    reads, add = _codes if in_codes else _words, _add_halves if in_halves else _add_pairs
    panels = [builder.gep(weights, [builder.mul(size, place)]) for place in places]
    read = [reads(builder, panel, pairs) for panel in panels]
    sums = [
        [cgutils.alloca_once_value(builder, zero) for _ in range(WIDTH * len(panels))]
        for _ in range(rows)
    ]
    with cgutils.for_range(builder, pairs) as loop:
        asked = far(builder, loop.index)
        words = [word for each in read for word in each(loop.index, asked)]
        add(builder, sums, x, words, loop.index, apart)
    return sums


def _words(builder: Any, panel: Any, _: Any) -> Any:
    """What reads a pair of inputs' words of a panel. The next ones are asked for."""
    panel, tiles = builder.bitcast(panel, INTS.as_pointer()), Tiles(builder)

    def read(pair: Any, far: Any) -> list[Any]:
        first, then = (builder.mul(at, ir.Constant(WIDE, WIDTH)) for at in (pair, far))
        for vector in range(WIDTH):
            tiles.fetch(tiles.place(panel, then, vector), near=False)
            tiles.fetch(tiles.place(panel, first, _NEAR * WIDTH + vector))
        places = [builder.add(first, ir.Constant(WIDE, vector)) for vector in range(WIDTH)]
        return [builder.load(builder.gep(panel, [at]), align=4) for at in places]

    return read


def _codes(builder: Any, panel: Any, pairs: Any) -> Any:
    """The same of a panel of codes."""
    bases, tiles = bases_of(builder, panel, pairs), Tiles(builder)

    def read(pair: Any, far: Any) -> list[Any]:
        first, then = (builder.mul(at, ir.Constant(WIDE, PANEL)) for at in (pair, far))
        tiles.fetch(tiles.place(panel, then))
        places = [builder.add(first, ir.Constant(WIDE, v * LANES)) for v in range(WIDTH)]
        return [words_of(builder, panel, at, base) for at, base in zip(places, bases, strict=True)]

    return read


def bases_of(builder: Any, codes: Any, pairs: Any) -> list[Any]:
    """Of each vector of a panel's outputs."""
    emit, at = Emit(builder), builder.mul(pairs, ir.Constant(WIDE, PANEL))
    places = [builder.add(at, ir.Constant(WIDE, v * BASES * LANES)) for v in range(WIDTH)]
    return [emit.load(codes, place, _SHORTS) for place in places]


def words_of(builder: Any, codes: Any, at: Any, base: Any) -> Any:
    """Two inputs' weights of sixteen outputs, from codes."""
    shift, mask = (ir.Constant(_SHORTS, [n] * 2 * LANES) for n in (3, 0x83F8))
    wide = builder.sext(Emit(builder).load(codes, at, _BYTES), _SHORTS)
    numbers = builder.and_(builder.shl(wide, shift), mask)
    return builder.bitcast(builder.add(numbers, base), INTS)


def _add_pairs(builder: Any, sums: Any, x: Any, words: Any, pair: Any, apart: Any) -> None:
    emit = Emit(builder, pairs=True)
    for row, totals in enumerate(sums):
        at = builder.add(builder.mul(apart, ir.Constant(WIDE, row)), pair)
        factor = emit.spread(x, at)
        for total, weight in zip(totals, words, strict=True):
            emit.add_product(total, factor, weight)


def _add_halves(builder: Any, sums: Any, x: Any, words: Any, pair: Any, apart: Any) -> None:
    emit, halves = Emit(builder), [halves_of(builder, each) for each in words]
    for half, weights in enumerate(zip(*halves, strict=True)):
        column = emit.at(pair, 0, 2, half)
        for row, totals in enumerate(sums):
            at = builder.add(builder.mul(apart, ir.Constant(WIDE, row)), column)
            factor = emit.spread(x, at)
            for total, weight in zip(totals, weights, strict=True):
                emit.add_product(total, factor, weight)


def _store(builder: Any, sums: Any, y: Any, places: Any, stride: Any) -> None:
    emit = Emit(builder)
    for row, totals in enumerate(sums):
        begin = builder.mul(stride, ir.Constant(WIDE, row))
        for stream, place in enumerate(places):
            first = builder.add(begin, builder.mul(place, ir.Constant(WIDE, PANEL)))
            for vector in range(WIDTH):
                total = builder.load(totals[stream * WIDTH + vector])
                emit.store(total, y, builder.add(first, ir.Constant(WIDE, vector * LANES)))


@fast
def by_vectors(x: Any, pairs: Any, weights: Any, y: Any) -> None:
    """`x` rows of so many pairs as numbers or, multiplied as pairs, as words; `weights` words or
    codes; `y` float32 `[rows, padded(out)]`. As many rows at once as follow from equal parts: one
    row alone would wait for its sums."""
    rows, panels, stride = x.shape[0], weights.shape[0], y.shape[1]
    if rows == 0:
        return
    apart = x.shape[1]
    few, parts = rows <= _FEW, (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    streams = _STREAMS[rows - 1] if few else _OF_MANY
    each, size = (panels + streams - 1) // streams, weights.shape[1] * weights.shape[2]
    last = panels - each
    for i in range(each):
        # Where the panels are no multiple of the streams some go twice.
        at = (i, i + min(each, last), i + min(2 * each, last), i + min(3 * each, last))
        # Behind the last ones the next layer's of the same kind are asked for: the caches keep them
        # if the model is small.
        gap = weights.shape[1] * (1 if i + 1 < each else last + 1) - pairs
        if few:
            _few(rows, x, 0, apart, pairs, weights, at, size, y, stride, (gap, 0))
        else:
            row = 0
            for part in range(parts):
                some = (rows - row) // (parts - part)
                far = (gap + part * pairs // parts, (1 << _POINT) // parts)
                _many(some, x, row, apart, pairs, weights, at, size, y, stride, far)
                row += some
