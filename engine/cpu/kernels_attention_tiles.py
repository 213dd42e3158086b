"""Attention of a few columns over one head's keys and values in bfloat16, on tiles (AMX).

A column is a query: of a row, and of a head among those that share their keys. Sixteen keys as they
lie times up to eight columns are one product per 32 dimensions, and so are the weights of sixteen
keys and their values as they lie: the instruction adds products of neighbours, and a column has two
rows of weights, those of even dimensions with zeros between them and those of odd ones. So columns
beyond the first cost little more than their softmax (`engine.cpu.kernels_softmax`), and the first
what its keys and values take from memory, which are therefore asked for one stage ahead. A column's
sums run over its head's dimensions and over its keys in an order that depends on nothing else, and
a key that a row must not see has weight zero: its result is the same to the bit in any company.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.kernels_heads import number, rounded_pair
from engine.cpu.kernels_tiles import SIDE, Tiles
from engine.cpu.vectors import FLOATS, INT, INTS, LANES, WIDE, Emit, pointers

COLUMNS = SIDE // 2  # at once
_SUMS, _SHARES, _KEYS, _SCORES, _QUERIES = (0, 1), 2, 3, 4, (5, 6, 7)  # tiles
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


@intrinsic  # type: ignore[misc]
def begin(typing: Any, columns: Any) -> Any:
    """Tiles for so many columns, until `end_of_tiles`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole, columns = number(SIDE), args[0]
        rows = builder.mul(columns, number(2))
        shapes = dict.fromkeys((*_SUMS, _SHARES), (rows, whole))
        more = dict.fromkeys((_SCORES, *_QUERIES), (whole, columns))
        Tiles(builder).shape({**shapes, **more, _KEYS: (whole, whole)})
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[misc]
def score(
    typing: Any, parts: Any, queries: Any, at: Any, columns: Any, keys: Any, values: Any,
    start: Any, slots: Any, first: Any, count: Any, runs: Any, out: Any, to: Any,
) -> Any:  # fmt: skip
    """Products of `columns` queries with `count` keys into `out[to:]` float32 `[keys, columns]`, to
    a multiple of SIDE keys. `queries[at:]` words `[dim / 2, columns]`; `keys[start:]` words of
    slots, `dim / 2` each, and so `values`, which are asked for; `slots[first:]` those of the keys.
    `runs` is not zero where slots from each multiple of SIDE on follow one another. `parts` is a
    tuple of `dim / 32` numbers, so that each dimension has code of its own."""
    whole = types.int64
    signature = types.void(
        parts, queries, whole, whole, keys, values, whole, slots, whole, whole, whole, out,
        whole,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = pointers(context, builder, signature, args)
        _emit_scores(builder, len(signature.args[0]), given[1:])
        return context.get_dummy_value()

    return signature, generate


def _emit_scores(builder: Any, parts: int, given: list[Any]) -> None:
    queries, at, columns, keys, values, start, slots, first, count, runs, out, to = given
    out = builder.gep(out, [to])
    tiles, across = Tiles(builder), builder.mul(columns, number(4))
    slots = builder.gep(slots, [first])
    keys, values = (builder.gep(plane, [start]) for plane in (keys, values))
    copied = _space(builder, SIDE * SIDE * parts)

    def load(part: int) -> int:
        tile = _QUERIES[min(part, len(_QUERIES) - 1)]
        mine = builder.add(at, builder.mul(columns, number(part * SIDE)))
        tiles("x86.tileloadd64", tile, tiles.place(queries, mine), across)
        return tile

    resident = [load(part) for part in range(min(parts, len(_QUERIES)))]
    with cgutils.for_range(builder, _blocks(builder, count, SIDE), intp=WIDE) as loop:
        key = builder.mul(loop.index, number(SIDE))
        place = _place(builder, parts, (keys, slots, key), (count, runs), copied)
        _ask_for(tiles, parts, (values, slots, key), count)
        tiles("x86.tilezero", _SCORES)
        for part in range(parts):
            tile = resident[part] if parts <= len(_QUERIES) else load(part)
            here = tiles.place(place, number(part * SIDE))
            tiles("x86.tileloadd64", _KEYS, here, number(4 * SIDE * parts))
            tiles("x86.tdpbf16ps", _SCORES, _KEYS, tile)
        target = tiles.place(out, builder.mul(key, columns))
        tiles("x86.tilestored64", _SCORES, target, across)


def _blocks(builder: Any, count: Any, size: int) -> Any:
    """Upwards."""
    return builder.udiv(builder.add(count, number(size - 1)), number(size))


def _slot(builder: Any, slots: Any, at: Any, words: int) -> Any:
    """The word at which the slot of a key begins."""
    return builder.mul(builder.load(builder.gep(slots, [at])), number(words))


def _space(builder: Any, words: int) -> Any:
    """At a border of cache lines."""
    space = cgutils.alloca_once(builder, INT, size=words)
    space.align = 4 * LANES
    return space


def _place(builder: Any, parts: int, source: Any, sizes: Any, space: Any) -> Any:
    """Where sixteen keys or values lie one behind the other: as they are if `runs` and there are so
    many, else in `space`, with zeros behind the last."""
    (plane, slots, first), (count, runs), emit = source, sizes, Emit(builder)
    place = cgutils.alloca_once(builder, plane.type)
    left = builder.sub(count, first)
    many = builder.icmp_signed(">=", left, number(SIDE))
    here = builder.and_(many, builder.icmp_signed("!=", runs, number(0)))
    with builder.if_else(here) as (there, apart):
        with there:
            at = _slot(builder, slots, first, SIDE * parts)
            builder.store(builder.gep(plane, [at]), place)
        with apart:
            cgutils.memset(builder, space, number(4 * SIDE * SIDE * parts), 0)
            left = builder.select(many, number(SIDE), left)
            with cgutils.for_range(builder, left, intp=WIDE) as loop:
                at = _slot(builder, slots, builder.add(first, loop.index), SIDE * parts)
                for part in range(parts):
                    words = emit.load(plane, emit.at(at, part * LANES), INTS)
                    emit.store(words, space, emit.at(loop.index, 0, SIDE * parts, part * LANES))
            builder.store(space, place)
    return builder.load(place)


def _ask_for(tiles: Any, parts: int, source: Any, count: Any) -> None:
    """Sixteen slots from that of a key on, or as many as there are; nothing is read that may not
    be. Between asking and use lie more than the first cache holds."""
    (plane, slots, first), builder = source, tiles.builder
    at = _slot(builder, slots, first, SIDE * parts)
    left = builder.sub(count, first)
    left = builder.select(builder.icmp_signed("<", left, number(SIDE)), left, number(SIDE))
    with cgutils.for_range(builder, left, intp=WIDE) as loop:
        there = builder.add(at, builder.mul(loop.index, number(SIDE * parts)))
        for line in range(parts):
            tiles.fetch(tiles.place(plane, there, line * LANES), near=False)


@intrinsic  # type: ignore[misc]
def weigh(
    typing: Any, parts: Any, shares: Any, at: Any, columns: Any, values: Any, start: Any,
    slots: Any, first: Any, count: Any, runs: Any, keys: Any, then: Any, out: Any, to: Any,
) -> Any:  # fmt: skip
    """Sums of `count` values by `shares[at:]`, as of `softmax` words `[columns, 2, keys]`, keys to
    a multiple of SIDE; `out[to:]` float32 `[parts, columns, 2, SIDE]`, even elements, then odd
    ones, by 32. `values`, `start`, `slots`, `first` and `runs` as of `score`. Meanwhile `keys` are
    asked for: `then` is their `start` and `first`, and how many."""
    whole = types.int64
    signature = types.void(
        parts, shares, whole, whole, values, whole, slots, whole, whole, whole, keys, then, out,
        whole,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, *given = pointers(context, builder, signature, args)
        shares, at, columns, values, start, slots, first, count, runs, keys, then, out, to = given
        shares, out = builder.gep(shares, [at]), builder.gep(out, [to])
        ahead, at, left = (builder.extract_value(then, i) for i in range(3))
        ahead = (builder.gep(keys, [ahead]), builder.gep(slots, [at]), left)
        here = (builder.gep(values, [start]), builder.gep(slots, [first]))
        parts = len(signature.args[0])
        for part in range(0, parts, len(_SUMS)):
            some = range(part, min(part + len(_SUMS), parts))
            more = ahead if part == 0 else None
            _emit_values(builder, (parts, some), (shares, out), here, (columns, count, runs), more)
        return context.get_dummy_value()

    return signature, generate


def _emit_values(
    builder: Any, size: Any, pointers: Any, source: Any, sizes: Any, ahead: Any
) -> None:
    """A few vectors of every value."""
    (parts, some), (shares, out), (columns, count, runs) = size, pointers, sizes
    tiles = Tiles(builder)
    blocks, space = _blocks(builder, count, SIDE), _space(builder, SIDE * SIDE * parts)
    across, sums = builder.mul(blocks, number(4 * SIDE)), _SUMS[: len(some)]
    for total in sums:
        tiles("x86.tilezero", total)
    with cgutils.for_range(builder, blocks, intp=WIDE) as loop:
        first = builder.mul(loop.index, number(SIDE))
        if ahead is not None:
            with builder.if_then(builder.icmp_signed("<", first, ahead[2])):
                _ask_for(tiles, parts, (*ahead[:2], first), ahead[2])
        place = _place(builder, parts, (*source, first), (count, runs), space)
        tiles("x86.tileloadd64", _SHARES, tiles.place(shares, first), across)
        for part, total in zip(some, sums, strict=True):
            here = tiles.place(place, number(part * SIDE))
            tiles("x86.tileloadd64", _KEYS, here, number(4 * SIDE * parts))
            tiles("x86.tdpbf16ps", total, _SHARES, _KEYS)
    for part, total in zip(some, sums, strict=True):
        at = builder.mul(columns, number(part * 2 * SIDE))
        tiles("x86.tilestored64", total, tiles.place(out, at), number(4 * SIDE))


@intrinsic  # type: ignore[misc]
def finish(
    typing: Any, parts: Any, sums: Any, to: Any, columns: Any, column: Any, scale: Any, out: Any,
    at: Any,
) -> Any:  # fmt: skip
    """A column of the `sums[to:]` of `weigh`, times `scale`, into words `out[at:]`."""
    whole = types.int64
    signature = types.void(parts, sums, whole, whole, whole, types.float32, out, whole)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, *given = pointers(context, builder, signature, args)
        sums, to, columns, column, scale, out, at = given
        emit, sums = Emit(builder), builder.gep(sums, [to])
        scale = emit.everywhere(scale, FLOATS)
        mask = [i + LANES * odd for i in range(LANES) for odd in (0, 1)]
        order = ir.Constant(ir.VectorType(INT, 2 * LANES), mask)
        for part in range(len(signature.args[0])):
            mine = builder.add(builder.mul(columns, number(part)), column)
            both = [emit.load(sums, emit.at(mine, 0, 2 * SIDE, odd * SIDE)) for odd in (0, 1)]
            two = rounded_pair(emit, *(builder.fmul(x, scale) for x in both))
            two = builder.bitcast(two, _HALVES)
            words = builder.shuffle_vector(two, two, order)
            emit.store(builder.bitcast(words, INTS), out, emit.at(at, part * LANES))
        return context.get_dummy_value()

    return signature, generate
