"""Products with weights of eight bits, for drafts, whose steps are the reading of their weights and
whose guesses need not be exact. For processors that multiply tiles of bfloat16 (AMX), and for those
that take its pairs apart (`engine.cpu.kernels_bfloat16`).

A weight is a sign, three bits of exponent and four of mantissa; the exponent counts from the least
that its output needs, so no number is multiplied afterwards. Four instructions make 32 weights
bfloat16 again, from where on products are those of sixteen bits: a row is the same to the bit in
any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from torch import Tensor

from engine.cpu.jit import HAS_TILES, fast
from engine.cpu.kernels_bfloat16 import padded, product_of_pairs, taken_apart
from engine.cpu.kernels_streams import BASES, PANEL, bases_of, by_vectors, words_of
from engine.cpu.kernels_tiles import (
    ROWS,
    SIDE,
    SUMS,
    WEIGHTS,
    Tiles,
    begin_tiles,
    end_of_tiles,
    more_rows,
    room,
)
from engine.cpu.kernels_twelve import product_of_twelve
from engine.cpu.vectors import LANES, SLOW_PAIRS, WIDE, Emit, pointers

Codes = npt.NDArray[np.uint16]

_MANTISSA, _EXPONENTS = 4, 8
_BIAS, _LEAST = 127, -119  # of bfloat16; the exponent of the smallest largest weight
_AHEAD = 2048  # bytes


def suits(inputs: int) -> bool:
    """Whether they are faster here, at least for few rows, and so many inputs are whole tiles."""
    return (HAS_TILES or SLOW_PAIRS) and inputs % (2 * SIDE) == 0


def pack(weight: Tensor) -> Codes:
    """`[out, in]` -> `[panels, in / 2 + 2, PANEL]`. Two inputs' codes of an output, the first in
    the low half; in the last two rows the exponents' bases of all outputs as bfloat16, twice each.
    Missing outputs are zero."""
    outputs, inputs = weight.shape
    assert inputs % (2 * SIDE) == 0
    codes, bases = _coded(weight.detach().float())
    full = np.zeros((padded(outputs), inputs), dtype=np.uint8)
    full[:outputs] = codes
    every = np.zeros(padded(outputs), dtype=np.uint32)
    every[:outputs] = bases * 0x10001
    panels = len(full) // PANEL
    found = np.empty((panels, inputs // 2 + BASES, PANEL), dtype=np.uint16)
    pairs = full.view(np.uint16).reshape(panels, PANEL, inputs // 2)
    found[:, :-BASES] = pairs.transpose(0, 2, 1)
    found[:, -BASES:] = every.view(np.uint16).reshape(panels, BASES, PANEL)
    return found


def _coded(weight: Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Of each weight the code, of each output the base."""
    size = weight.abs()
    top = torch.log2(size.amax(1, keepdim=True)).floor().clamp_min(_LEAST)
    lowest = top - (_EXPONENTS - 1)
    steps = 1 << _MANTISSA
    exponent = torch.log2(size).floor().clamp(lowest, top)
    mantissa = (size / 2.0**exponent * steps).round() - steps
    # A rounded mantissa may be the next exponent's first; what is too small is the least there is.
    code = ((exponent - lowest) * steps + mantissa).clamp(0, _EXPONENTS * steps - 1)
    odd = (torch.arange(weight.shape[1]) % 2 == 1).expand_as(weight)  # or zeros would add up
    negative = torch.where(size > 0, weight < 0, odd)
    codes = (code + 128 * negative).to(torch.uint8).numpy()
    bases = ((lowest[:, 0] + _BIAS).to(torch.int64) << 7).numpy().astype(np.uint32)
    return codes, bases


@intrinsic  # type: ignore[misc]
def _first(typing: Any, x: Any, pairs: Any, codes: Any, space: Any, y: Any, stride: Any) -> Any:
    """A panel's outputs of the rows of a tile; its weights as words are in `space` afterwards. `x`
    rows of `pairs` words each; `codes` one panel; `y` float32, rows `stride` apart."""
    whole = types.int64
    signature = types.void(x, whole, codes, space, y, whole)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, pairs, codes, space, y, stride = pointers(context, builder, signature, args)
        _emit(builder, (x, codes, space, y), pairs, stride)
        return context.get_dummy_value()

    return signature, generate


def _emit(builder: Any, arrays: Any, pairs: Any, stride: Any) -> None:
    (x, codes, space, y), tiles = arrays, Tiles(builder)
    row, out = (builder.mul(words, ir.Constant(WIDE, 4)) for words in (pairs, stride))
    across = ir.Constant(WIDE, 4 * PANEL)
    bases = bases_of(builder, codes, pairs)
    for tile in SUMS[0]:
        tiles("x86.tilezero", tile)
    step, zero = ir.Constant(WIDE, SIDE), ir.Constant(WIDE, 0)
    _unpack(builder, codes, space, zero, bases)
    with cgutils.for_range_slice(builder, zero, pairs, step, WIDE) as (pair, _):
        start = builder.mul(pair, ir.Constant(WIDE, PANEL))
        then = builder.add(pair, step)
        with builder.if_then(builder.icmp_signed("<", then, pairs)):
            # A tile is loaded only when all that was stored before it has left for the caches.
            _unpack(builder, codes, space, builder.mul(then, ir.Constant(WIDE, PANEL)), bases)
        tiles("x86.tileloadd64", ROWS[0], tiles.place(x, pair), row)
        for side, (total, tile) in enumerate(zip(SUMS[0], WEIGHTS, strict=True)):
            tiles("x86.tileloadd64", tile, tiles.place(space, start, side * SIDE), across)
            tiles("x86.tdpbf16ps", total, ROWS[0], tile)
    for side, total in enumerate(SUMS[0]):
        tiles("x86.tilestored64", total, tiles.place(y, zero, side * SIDE), out)


def _unpack(builder: Any, codes: Any, space: Any, start: Any, bases: list[Any]) -> None:
    """A tile's height of a panel's codes, from `start` on, to words in `space`."""
    emit, tiles = Emit(builder), Tiles(builder)
    for line in range(2 * SIDE):
        at = builder.add(start, ir.Constant(WIDE, line * LANES))
        if line % 2 == 0:
            tiles.fetch(tiles.place(codes, at, _AHEAD // 2))
        emit.store(words_of(builder, codes, at, bases[line % 2]), space, at)


@fast
def product_of_codes(x: Any, codes: Any, y: Any) -> None:
    """As `kernels_bfloat16.product_of_pairs`, with codes of `pack`."""
    if HAS_TILES:
        _by_tiles(x, codes, y)
    else:
        by_vectors(taken_apart(x), x.shape[1], codes, y)


@fast
def _by_tiles(x: Any, codes: Any, y: Any) -> None:
    rows, pairs, stride = x.shape[0], x.shape[1], y.shape[1]
    if rows == 0:
        return
    space = room(pairs, PANEL).view(np.uint32)
    begin_tiles(min(rows, SIDE))
    for panel in range(codes.shape[0]):
        at = panel * PANEL
        _first(x, pairs, codes[panel], space, y[0, at:], stride)
        for row in range(SIDE, rows, SIDE):
            row = min(row, rows - SIDE)
            more_rows(x, row, pairs, space, 0, y, at, stride, 0, 0)
    end_of_tiles()


_OF = {1: product_of_twelve, 2: product_of_codes, 4: product_of_pairs}  # by bytes of a number


def product(x: Any, weights: Any, y: Any) -> None:
    """With weights of any kind; compiled code knows at once of which."""
    _OF[weights.dtype.itemsize](x, weights, y)


@overload(product)  # type: ignore[misc]
def _product(x: Any, weights: Any, y: Any) -> Any:
    chosen = _OF[weights.dtype.bitwidth // 8]

    def call(x: Any, weights: Any, y: Any) -> None:
        chosen(x, weights, y)

    return call
