"""Matrix products of bfloat16 rows with AMX tiles.

One instruction multiplies sixteen input pairs of up to sixteen rows for sixteen outputs, so sixteen
rows take only as long as reading the weights for one. With more rows, two tiles of rows share each
loaded weight. A row's sums run over the inputs in a fixed order, so its result is bit-identical for
any number of rows in the product. It differs from the vector kernels' result, because a tile sums
even and odd inputs separately and adds the two sums last.

Weights are words (`engine.cpu.weights.pack`), or eight- or twelve-bit codes that are unpacked to
words one step (SIDE input pairs of a panel: two weight tiles) before they are multiplied, so the
time is that of reading the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast, fast_in_place
from engine.cpu.vectors import INTS, LANES, PANEL, WIDE, Emit, pointers

SIDE = 16  # rows of a tile, and words per tile row
STEP = 2 * SIDE * PANEL  # weights per step
NONE = np.uint32(0xFFFFFFFF)  # ends a panel's list of exceptions
_SUMS, _ROWS, _WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)  # tile registers; a panel is two wide
_AHEAD = 512  # prefetch distance in words; doubled above _FEW rows, whose steps take longer
_FEW = 8
_CODES_AHEAD = 2048  # prefetch distance in bytes
_STREAMS = 12  # places from which the next twelve-bit panel is prefetched
_LINE = 64  # bytes
TAIL = 3 * _LINE  # bytes after a panel's eight-bit codes: a number per output, and NONE
_BYTE, _SHORT, _INT = (ir.IntType(bits) for bits in (8, 16, 32))
_BYTES, _ALL = (ir.VectorType(_BYTE, lanes) for lanes in (2 * LANES, 4 * LANES))
_SHORTS = ir.VectorType(_SHORT, 2 * LANES)


class Tiles:
    """Emits tile instructions at the builder's position."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call the LLVM intrinsic `llvm.x86.<name>`. Ints are tile numbers, encoded in it."""
        given = [ir.Constant(_BYTE, a) if isinstance(a, int) else a for a in arguments]
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in given])
        called = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}")
        self.builder.call(called, given)

    def place(self, array: Any, index: Any, more: int = 0) -> Any:
        """Return a byte pointer to an array element."""
        at = self.builder.add(index, ir.Constant(WIDE, more))
        return self.builder.bitcast(self.builder.gep(array, [at]), _BYTE.as_pointer())

    def shape(self, shapes: Mapping[int, tuple[Any, Any]]) -> None:
        """Configure tiles as (rows, words per row), both int64. The thread keeps this
        configuration until `end_of_tiles`."""
        builder = self.builder
        config = cgutils.alloca_once(builder, _BYTE, size=64)
        cgutils.memset(builder, config, ir.Constant(WIDE, 64), 0)
        builder.store(ir.Constant(_BYTE, 1), config)  # palette 1, the only one
        for tile, (rows, words) in shapes.items():
            place = builder.gep(config, [ir.Constant(WIDE, 16 + 2 * tile)])
            width = builder.trunc(builder.mul(words, ir.Constant(WIDE, 4)), _SHORT)
            builder.store(width, builder.bitcast(place, _SHORT.as_pointer()))
            place = builder.gep(config, [ir.Constant(WIDE, 48 + tile)])
            builder.store(builder.trunc(rows, _BYTE), place)
        self("ldtilecfg", config)


@intrinsic  # type: ignore[misc]
def begin_tiles(typing: Any, rows: Any) -> Any:
    """Configure the tiles for sums and inputs of `rows` rows each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.Constant(WIDE, SIDE)
        shapes = dict.fromkeys((*_SUMS[0], *_SUMS[1], *_ROWS), (args[0], whole))
        Tiles(builder).shape({**shapes, **dict.fromkeys(_WEIGHTS, (whole, whole))})
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _for_each(name: str, *calls: Any) -> Any:
    """Return an intrinsic that runs an instruction with each of `calls`, tuples of tiles."""

    @intrinsic  # type: ignore[misc]
    def run(typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for tiles in calls:
                Tiles(builder)(name, *tiles)
            return context.get_dummy_value()

        return types.void(), generate

    return run


end_of_tiles = _for_each("tilerelease", ())  # so that a context switch need not save them
_no_sums = _for_each("tilezero", *((total,) for totals in _SUMS for total in totals))


def _multiply(tiles: int) -> Any:
    """Return an intrinsic that adds a step's products to the sums of one or two tiles of rows. Each
    weight is loaded once for both."""

    @intrinsic  # type: ignore[misc]
    def multiply(typing: Any, x: Any, at: Any, pairs: Any, second: Any, words: Any, to: Any) -> Any:
        """`x[at:]`: input rows of `pairs` words, the second tile starting `second` rows below;
        `words[to:]`: the step's weights."""
        whole = types.int64

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, at, pairs, second, words, to = pointers(context, builder, signature, args)
            emit, row = Tiles(builder), builder.mul(pairs, ir.Constant(WIDE, 4))
            places = [at, builder.add(at, builder.mul(pairs, second))]
            inputs = list(zip(_ROWS, _SUMS, places, strict=True))[:tiles]
            for rows, _, place in inputs:
                emit("tileloadd64", rows, emit.place(x, place), row)
            for side, tile in enumerate(_WEIGHTS):
                here = emit.place(words, to, side * SIDE)
                emit("tileloadd64", tile, here, ir.Constant(WIDE, 4 * PANEL))
                for rows, sums, _ in inputs:
                    emit("tdpbf16ps", sums[side], rows, tile)
            return context.get_dummy_value()

        return types.void(x, whole, whole, whole, words, whole), generate

    return multiply


def _store(tiles: int) -> Any:
    """Return an intrinsic that stores the sums of one or two tiles of rows."""

    @intrinsic  # type: ignore[misc]
    def store(typing: Any, y: Any, to: Any, stride: Any, second: Any) -> Any:
        """Write to `y[to:]` float32, rows `stride` apart, the second tile `second` rows below."""
        whole = types.int64

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, to, stride, second = pointers(context, builder, signature, args)
            emit, out = Tiles(builder), builder.mul(stride, ir.Constant(WIDE, 4))
            places = [to, builder.add(to, builder.mul(stride, second))]
            for sums, place in list(zip(_SUMS, places, strict=True))[:tiles]:
                for side, total in enumerate(sums):
                    emit("tilestored64", total, emit.place(y, place, side * SIDE), out)
            return context.get_dummy_value()

        return types.void(y, whole, whole, whole), generate

    return store


_multiply_one, _multiply_two = (_multiply(tiles) for tiles in (1, 2))
_store_one, _store_two = (_store(tiles) for tiles in (1, 2))


@intrinsic  # type: ignore[misc]
def _prefetch_step(typing: Any, words: Any, at: Any) -> Any:
    """Prefetch the step `words[at:]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, at = pointers(context, builder, signature, args)
        emit = Emit(builder)
        for line in range(STEP // 2 // LANES):
            emit.prefetch(words, emit.at(at, line * LANES), near=True)
        return context.get_dummy_value()

    return types.void(words, types.int64), generate


@fast_in_place
def product_of_tiles(x: Any, words: Any, y: Any) -> None:
    """Compute y = x W'. `x` uint32 `[rows, in / 2]`, in / 2 a multiple of SIDE; `words` from
    `weights.pack`; `y` float32 `[rows, padded(out)]`."""
    rows, pairs = x.shape
    if rows == 0:
        return
    begin_tiles(min(rows, SIDE))
    ahead = _AHEAD if rows <= _FEW else 2 * _AHEAD
    for panel in range(words.shape[0]):
        for row in range(0, rows, 2 * SIDE):
            # Only the first rows prefetch; later rows of a panel find its weights in the cache.
            _rows(x, row, words, panel * pairs * PANEL, y, panel * PANEL, ahead * int(row == 0))
    end_of_tiles()


@fast_in_place
def _rows(x: Any, row: Any, words: Any, start: Any, y: Any, to: Any, ahead: Any) -> None:
    """Compute a panel's outputs for one or two tiles of rows from `row` on. The last tile starts
    earlier, overlapping rows already computed, so that all tiles have the same height."""
    (rows, pairs), stride = x.shape, y.shape[1]
    second = min(SIDE, rows - row - SIDE)
    first = row if second > 0 else max(rows - SIDE, 0)
    _no_sums()
    for step in range(pairs // SIDE):
        at, to_step = first * pairs + step * SIDE, start + step * (STEP // 2)
        if ahead > 0:
            _prefetch_step(words, to_step + ahead)
        if second > 0:
            _multiply_two(x, at, pairs, second, words, to_step)
        else:
            _multiply_one(x, at, pairs, 0, words, to_step)
    if second > 0:
        _store_two(y, first * stride + to, stride, second)
    else:
        _store_one(y, first * stride + to, stride, 0)


@fast_in_place
def product_of_codes(x: Any, codes: Any, space: Any, y: Any) -> None:
    """`product_of_tiles` for codes; each panel is unpacked to `space`, a `room(in / 2, PANEL)`."""
    rows = x.shape[0]
    if rows == 0:
        return
    words, space = codes.view(np.uint32), space.reshape(-1).view(np.uint32)
    stride, second = y.shape[1], min(SIDE, rows - SIDE)
    begin_tiles(min(rows, SIDE))
    for panel in range(codes.shape[0]):
        to = panel * PANEL
        _no_sums()
        _first_rows(x, second, codes[panel], words[panel], codes.shape[1], space)
        if second > 0:
            _store_two(y, to, stride, second)
        else:
            _store_one(y, to, stride, 0)
        for row in range(2 * SIDE, rows, 2 * SIDE):
            _rows(x, row, space, 0, y, to, 0)
    end_of_tiles()


@fast_in_place
def _first_rows(x: Any, second: Any, codes: Any, words: Any, width: Any, space: Any) -> None:
    """Compute a panel's sums for the first one or two tiles of rows, and leave its unpacked weights
    in `space`. `words`: the codes, viewed as uint32."""
    pairs, numbers = x.shape[1], space.view(np.uint16)
    steps = pairs // SIDE
    odd = exceptions_at(codes, steps)
    then = np.int64(words[odd])
    for step in range(steps + 1):
        if step < steps:
            # Unpack one step ahead: a tile load waits until earlier stores have reached the cache.
            unpack(codes, step, steps, width, space)
            while then < (step + 1) * STEP:
                numbers[then] = words[odd + 1]
                odd += 2
                then = np.int64(words[odd])
        if step > 0:
            at, before = (step - 1) * SIDE, (step - 1) * (STEP // 2)
            if second > 0:
                _multiply_two(x, at, pairs, second, space, before)
            else:
                _multiply_one(x, at, pairs, 0, space, before)


@intrinsic  # type: ignore[misc]
def exceptions_at(typing: Any, codes: Any, steps: Any) -> Any:
    """Return the index of the word at which a panel's list of exceptions begins."""
    step, more = (STEP * 3 // 2, _LINE) if codes.dtype == types.uint8 else (STEP, 2 * _LINE)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emit(builder).at(args[1], 0, step // 4, more // 4)

    return types.int64(codes, types.int64), generate


@intrinsic  # type: ignore[misc]
def unpack(typing: Any, codes: Any, step: Any, steps: Any, width: Any, space: Any) -> Any:
    """Unpack a step of a panel's `codes` to its place in `space`, and prefetch what comes next.
    Panels are `width` numbers apart."""
    whole = types.int64
    signature = types.void(codes, whole, whole, whole, space)
    ways = {"int8": _unpack_int8, "uint16": _unpack_eight, "uint8": _unpack_twelve}
    of_a_step = ways[str(codes.dtype)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, step, steps, width, space = pointers(context, builder, signature, args)
        codes = builder.bitcast(codes, _BYTE.as_pointer())
        of_a_step(Emit(builder), codes, (step, steps, width), space)
        return context.get_dummy_value()

    return signature, generate


def _unpack_int8(emit: Emit, codes: Any, sizes: Any, space: Any) -> None:
    """Leaves out the scales, which multiply the sums later."""
    for line in range(2 * SIDE):
        pair, side = divmod(line, 2)
        at = emit.at(sizes[0], 0, STEP, pair * 2 * PANEL + side * LANES)
        if side == 0:
            emit.prefetch(codes, emit.at(at, _CODES_AHEAD), near=True)
        word = emit.joined(emit.widened(codes, at))
        emit.store(word, space, emit.at(sizes[0], 0, STEP // 2, line * LANES))


def _unpack_eight(emit: Emit, codes: Any, sizes: Any, space: Any) -> None:
    """A code is a sign, three exponent bits and four mantissa bits. Shifted left by three, they are
    in place for a bfloat16, and the output's base is added."""
    (step, steps, _), builder = sizes, emit.builder
    bases = [emit.load(codes, emit.at(steps, 0, STEP, v * _LINE), _SHORTS) for v in range(2)]
    for line in range(2 * SIDE):
        at = emit.at(step, 0, STEP, line * 2 * LANES)
        if line % 2 == 0:
            emit.prefetch(codes, emit.at(at, _CODES_AHEAD), near=True)
        wide = builder.sext(emit.load(codes, at, _BYTES), _SHORTS)
        number = builder.and_(builder.shl(wide, _every(_SHORTS, 3)), _every(_SHORTS, 0x83F8))
        word = builder.bitcast(builder.add(number, bases[line % 2]), INTS)
        emit.store(word, space, emit.at(step, 0, STEP // 2, line * LANES))


def _unpack_twelve(emit: Emit, codes: Any, sizes: Any, space: Any) -> None:
    """Unpack four lines at a time, from sign-and-mantissa bytes and half bytes that index the
    exponent table. The next panel is prefetched from several places: hardware prefetchers follow
    many pages better than one."""
    (step, steps, width), builder, size = sizes, emit.builder, STEP * 3 // 2
    table = emit.load(codes, emit.at(steps, 0, size), _ALL)
    share, groups = size // _STREAMS, STEP // (8 * LANES)
    apart = builder.mul(steps, ir.Constant(WIDE, share))
    ahead = builder.add(width, emit.at(step, 0, share))
    later = [divmod(line, share // _LINE) for line in range(size // _LINE)]
    for group in range(groups):
        for stream, line in later[group::groups]:
            start = builder.add(ahead, builder.mul(apart, ir.Constant(WIDE, stream)))
            emit.prefetch(codes, emit.at(start, line * _LINE), near=False)
        halves = emit.load(codes, emit.at(step, 0, size, STEP + group * _LINE), _ALL)
        for line, exponent in enumerate(_exponents(emit, table, halves), 4 * group):
            signed = emit.load(codes, emit.at(step, 0, size, line * 2 * LANES), _BYTES)
            kept = builder.and_(builder.sext(signed, _SHORTS), _every(_SHORTS, 0x807F))
            other = builder.and_(exponent, _every(_SHORTS, 0x7F80))
            word = builder.bitcast(builder.or_(kept, other), INTS)
            emit.store(word, space, emit.at(step, 0, STEP // 2, line * LANES))


def _exponents(emit: Emit, table: Any, halves: Any) -> list[Any]:
    """Return four lines' exponents in bfloat16 position; the other bits are undefined."""
    builder, found = emit.builder, []
    high = builder.lshr(builder.bitcast(halves, _SHORTS), _every(_SHORTS, 4))
    for codes in (halves, builder.bitcast(high, _ALL)):
        four = builder.and_(codes, _every(_ALL, 15))
        two = builder.bitcast(look_up(emit, table, four), _SHORTS)
        found += [builder.shl(two, _every(_SHORTS, 7)), builder.lshr(two, _every(_SHORTS, 1))]
    return found


def look_up(emit: Emit, table: Any, codes: Any) -> Any:
    """Return table bytes by code; each quarter of the lanes uses its own quarter of the table."""
    function = emit.function("llvm.x86.avx512.pshuf.b.512", _ALL, [_ALL, _ALL])
    return emit.builder.call(function, [table, codes])


def _every(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * kind.count)


@fast
def room(rows: Any, words: Any) -> Any:
    """Return uninitialised float32 `[rows, words]`, aligned to a cache line: a tile whose rows each
    cross a cache line takes six times as long to load."""
    space = np.empty(rows * words + SIDE, np.float32)
    first = -(space.ctypes.data // 4) % SIDE
    return space[first : first + rows * words].reshape(rows, words)
