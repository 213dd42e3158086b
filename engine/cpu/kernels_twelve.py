"""Products with bfloat16 weights kept in twelve bits, for processors that multiply tiles of it
(AMX): to the bit those of `engine.cpu.kernels_tiles`, with three quarters of the reading.

The eight bits of exponent hardly differ among weights that were trained: sixteen of them serve
nearly all of a panel. So a weight is a sign and seven bits of mantissa in one byte, and half a byte
that says which of the panel's sixteen exponents; the few weights with another one are put in their
places afterwards. Where there are too many of them weights stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from engine.cpu.jit import HAS_TILES, fast
from engine.cpu.kernels_bfloat16 import pack as pack_words
from engine.cpu.kernels_streams import PANEL
from engine.cpu.kernels_tiles import (
    ROWS,
    SIDE,
    SUMS,
    WEIGHTS,
    Tiles,
    begin_tiles,
    end_of_tiles,
    rest,
    room,
)
from engine.cpu.vectors import INTS, LANES, WIDE, Emit, pointers

Codes = npt.NDArray[np.uint8]


class DoesNotFit(Exception):
    """Too many weights whose exponents are not among their panel's sixteen."""


_STEP, _GROUP, _LANES = 2 * SIDE * PANEL, 8 * LANES, 2 * LANES  # weights at once; of four lines
_SIGNED, _STEP_BYTES = _STEP, _STEP * 3 // 2  # bytes of a step: signs and mantissas; all
_LINE = 64
_KEPT = 0x807F  # of a weight, sign and mantissa
_NONE, _NEVER = 255, np.uint32(0xFFFFFFFF)
_RING = 4  # steps whose weights are held where few rows need them
_STREAMS = 12
_BYTES, _ALL = (ir.VectorType(ir.IntType(8), lanes) for lanes in (_LANES, 2 * _LANES))
_SHORTS = ir.VectorType(ir.IntType(16), _LANES)


def suits(inputs: int) -> bool:
    """Whether there are tiles here, and weights of so many inputs are whole ones."""
    return HAS_TILES and inputs % (2 * SIDE) == 0


def pack(weight: Tensor) -> Codes:
    """`[out, in]` -> `[panels, bytes]`. By SIDE pairs of inputs: the bytes of signs and mantissas
    in the order of `kernels_bfloat16.pack`, then the half bytes. Then the sixteen exponents, four
    times over. Then the weights that have another one: place in the panel and bits, 32 bits each,
    and a place that is none. Raises DoesNotFit."""
    words = pack_words(weight)
    panels, pairs, _ = words.shape
    most = pairs // 4
    tail = -(-8 * (most + 1) // _LINE) * _LINE
    found = np.zeros((panels, pairs // SIDE * _STEP_BYTES + _LINE + tail), dtype=np.uint8)
    numbers = words.view(np.uint16).reshape(panels, -1)
    for panel in range(panels):
        if not _pack(numbers[panel], found[panel], found[panel].view(np.uint32), most):
            raise DoesNotFit
    return found


@fast
def _pack(numbers: Any, out: Any, out_words: Any, most: Any) -> Any:
    """One panel; whether it fits, with so many exceptions at most."""
    table = len(numbers) // _STEP * _STEP_BYTES
    codes = _codes(numbers, out[table : table + _LINE])
    at, left = (table + _LINE) // 4, most
    for i in range(len(numbers)):
        number = np.int64(numbers[i])
        code = codes[(number >> 7) & 0xFF]
        if code == _NONE:
            if left == 0:
                return False
            out_words[at], out_words[at + 1] = i, number
            at, left, code = at + 2, left - 1, 0
        start, place = i // _STEP * _STEP_BYTES, i % _STEP
        out[start + place] = (number >> 8) & 0x80 | number & 0x7F
        group, line, lane = place // _GROUP, place % _GROUP // _LANES, place % _LANES
        half = start + _SIGNED + group * _LINE + 2 * lane + line % 2
        out[half] |= code << (4 * (line // 2))
    out_words[at] = _NEVER
    return True


@fast
def _codes(numbers: Any, table: Any) -> Any:
    """Of each exponent the code, or _NONE; the most frequent ones into `table`."""
    times, codes = np.zeros(256, np.int64), np.full(256, _NONE, np.int64)
    for i in range(len(numbers)):
        times[(numbers[i] >> 7) & 0xFF] += 1
    for code in range(16):
        exponent = np.argmax(times)
        times[exponent], codes[exponent] = -1, code
        for copy in range(4):
            table[16 * copy + code] = exponent
    return codes


@intrinsic  # type: ignore[misc]
def _unpack(
    typing: Any, codes: Any, at: Any, table: Any, ahead: Any, apart: Any, space: Any, to: Any
) -> Any:
    """The weights of a step from `codes[at:]` on to words `space[to:]`, with the exponents at
    `table`. The panel that comes next is asked for from _STREAMS places, `apart` bytes from each
    other, the first one `ahead`: processors foresee more of many pages than of one."""
    whole = types.int64
    signature = types.void(codes, whole, whole, whole, whole, space, whole)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, at, table, ahead, apart, space, to = pointers(context, builder, signature, args)
        emit, tiles = Emit(builder), Tiles(builder)
        exponents = emit.load(codes, table, _ALL)
        each = _STEP_BYTES // _LINE // _STREAMS
        later = [divmod(line, each) for line in range(_STREAMS * each)]
        groups = _STEP // _GROUP
        for group in range(groups):
            for stream, line in later[group::groups]:
                start = builder.add(ahead, builder.mul(apart, ir.Constant(WIDE, stream)))
                tiles.fetch(tiles.place(codes, start, line * _LINE), near=False)
            halves = emit.load(codes, emit.at(at, _SIGNED + group * _LINE), _ALL)
            found = _exponents(emit, exponents, halves)
            for line, exponent in enumerate(found, group * _GROUP // _LANES):
                signed = emit.load(codes, emit.at(at, line * _LANES), _BYTES)
                number = _joined(builder, builder.sext(signed, _SHORTS), exponent)
                emit.store(builder.bitcast(number, INTS), space, emit.at(to, line * LANES))
        return context.get_dummy_value()

    return signature, generate


def _exponents(emit: Emit, table: Any, halves: Any) -> list[Any]:
    """Of four lines the exponents, where a bfloat16 has them; in its other bits is anything."""
    builder, found = emit.builder, []
    look_up = emit.function("llvm.x86.avx512.pshuf.b.512", _ALL, [_ALL, _ALL])
    high = builder.lshr(builder.bitcast(halves, _SHORTS), _every(_SHORTS, 4))
    for codes in (halves, builder.bitcast(high, _ALL)):
        four = builder.and_(codes, _every(_ALL, 15))
        two = builder.bitcast(builder.call(look_up, [table, four]), _SHORTS)
        found += [builder.shl(two, _every(_SHORTS, 7)), builder.lshr(two, _every(_SHORTS, 1))]
    return found


def _joined(builder: Any, signed: Any, exponent: Any) -> Any:
    mine = builder.and_(signed, _every(_SHORTS, _KEPT))
    return builder.or_(mine, builder.and_(exponent, _every(_SHORTS, 0xFFFF ^ _KEPT)))


def _every(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * kind.count)


def _step(tiles: int) -> Any:
    """A function of compiled code: what a step's weights add to the sums of a tile of rows or
    two."""

    @intrinsic  # type: ignore[misc]
    def step(typing: Any, x: Any, at: Any, pairs: Any, second: Any, space: Any, start: Any) -> Any:
        """`x[at:]`, rows of `pairs` words, those of the second tile `second` rows below; a tile's
        height of words `space[start:]`."""
        whole = types.int64
        signature = types.void(x, whole, whole, whole, space, whole)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, at, pairs, second, space, start = pointers(context, builder, signature, args)
            emit, row = Tiles(builder), builder.mul(pairs, ir.Constant(WIDE, 4))
            places = [at, builder.add(at, builder.mul(pairs, second))]
            mine = list(zip(ROWS, SUMS, places, strict=True))[:tiles]
            for rows, _, place in mine:
                emit("x86.tileloadd64", rows, emit.place(x, place), row)
            for side, tile in enumerate(WEIGHTS):
                here = emit.place(space, start, side * SIDE)
                emit("x86.tileloadd64", tile, here, ir.Constant(WIDE, 4 * PANEL))
                for rows, sums, _ in mine:
                    emit("x86.tdpbf16ps", sums[side], rows, tile)
            return context.get_dummy_value()

        return signature, generate

    return step


_one, _two = _step(1), _step(2)


@intrinsic  # type: ignore[misc]
def _begin(typing: Any) -> Any:
    """No sums yet."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for total in (*SUMS[0], *SUMS[1]):
            Tiles(builder)("x86.tilezero", total)
        return context.get_dummy_value()

    return types.void(), generate


def _end(tiles: int) -> Any:
    """A function of compiled code that stores the sums of a tile of rows or two."""

    @intrinsic  # type: ignore[misc]
    def end(typing: Any, y: Any, to: Any, stride: Any, second: Any) -> Any:
        """`y[to:]` float32, rows `stride` apart, the second tile `second` rows below."""
        whole = types.int64
        signature = types.void(y, whole, whole, whole)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            y, to, stride, second = pointers(context, builder, signature, args)
            emit, out = Tiles(builder), builder.mul(stride, ir.Constant(WIDE, 4))
            places = [to, builder.add(to, builder.mul(stride, second))]
            for sums, place in list(zip(SUMS, places, strict=True))[:tiles]:
                for side, total in enumerate(sums):
                    emit("x86.tilestored64", total, emit.place(y, place, side * SIDE), out)
            return context.get_dummy_value()

        return signature, generate

    return end


_end_one, _end_two = _end(1), _end(2)


@fast
def product_of_twelve(x: Any, codes: Any, y: Any) -> None:
    """As `kernels_bfloat16.product_of_pairs`, with codes of `pack`."""
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    if rows == 0:
        return
    many = rows > 2 * SIDE  # all weights of a panel are kept for them
    space = room(pairs if many else _RING * SIDE, PANEL).view(np.uint32)
    held, words, second = -1 if many else _RING - 1, codes.view(np.uint32), min(SIDE, rows - SIDE)
    begin_tiles(min(rows, SIDE))
    for panel in range(codes.shape[0]):
        to = panel * PANEL
        _first(x, second, codes, words, panel, space, held)
        if rows <= SIDE:
            _end_one(y, to, stride, 0)
        else:
            _end_two(y, to, stride, second)
            rest(x, pairs, space, 0, y, to, stride)
    end_of_tiles()


@fast
def _first(x: Any, second: Any, codes: Any, words: Any, panel: Any, space: Any, held: Any) -> None:
    """Sums of a panel and the rows of the first tile, or the first two; its weights are in `space`
    afterwards, of the last steps or of all, as the bits of `held` say."""
    pairs, width = x.shape[1], codes.shape[1]
    steps, start, numbers = pairs // SIDE, panel * width, space.reshape(-1).view(np.uint16)
    table, each = start + steps * _STEP_BYTES, _STEP_BYTES // _STREAMS
    odd = (table - start + _LINE) // 4
    then = np.int64(words[panel, odd])
    _begin()
    for step in range(steps + 1):
        if step < steps:
            # A tile is loaded only when all that was stored before it has left for the caches.
            at, ahead = start + step * _STEP_BYTES, start + width + step * each
            _unpack(codes, at, table, ahead, steps * each, space, (step & held) * (_STEP // 2))
            while then < (step + 1) * _STEP:
                numbers[(step & held) * _STEP + then % _STEP] = words[panel, odd + 1]
                odd += 2
                then = np.int64(words[panel, odd])
        if step > 0:
            before = step - 1
            if second <= 0:
                _one(x, before * SIDE, pairs, 0, space, (before & held) * (_STEP // 2))
            else:
                _two(x, before * SIDE, pairs, second, space, (before & held) * (_STEP // 2))
