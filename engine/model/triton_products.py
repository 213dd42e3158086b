"""Batch-invariant products in Triton: a row's bits do not depend on the other rows.

Each output is a sum over the inputs, in parts that depend only on the weight's shape. The number of
rows decides only the tile, and whether each part has its own program. Libraries, in contrast, let
the number of rows decide how a sum is split.

A weight may be int8 with a float32 scale per output: its numbers are widened to the rows' dtype,
which is exact, and a finished sum is multiplied by the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from engine.cpu.decoder import int8_of
from engine.model.triton_layers import activated

TOGETHER = tl.constexpr(8)  # row tiles that run together, to read a weight once from memory
PROGRAMS = 256  # wanted at least: for few rows, the sums are split
OUTS, UNIT, LEAST = 64, 128, 1024  # outputs per tile; inputs per part: multiple of UNIT, least


class Tile(NamedTuple):
    """The size of a program. `step`: inputs per iteration."""

    rows: int
    outs: int
    step: int
    warps: int
    stages: int


# By the most rows of a product. `outs` are multiples of 64: all use the same matrix instruction.
TILES = {
    16: Tile(16, 64, 128, 4, 4), 32: Tile(32, 64, 128, 4, 4), 64: Tile(64, 64, 64, 4, 5),
    256: Tile(64, 128, 64, 8, 4),
}  # fmt: skip
LARGE, FLOAT32 = Tile(128, 128, 64, 8, 4), Tile(64, 64, 16, 4, 3)
SHARED = 1 << 17  # bytes of shared memory that LARGE needs; with less it has a stage fewer


@triton.jit
def _part(
    rows, weight, row, out, count, begin, end, OUT, IN,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the sums over inputs `begin .. end`, `[OUTS, ROWS]`."""
    found = tl.zeros([OUTS, ROWS], tl.float32)
    for first in range(begin, end, STEP):
        at = first + tl.arange(0, STEP)
        given = rows + row[None, :] * IN + at[:, None]
        by = weight + out[:, None] * IN + at[None, :]
        if EVEN:
            given, by = tl.load(given, (row < count)[None, :], 0.0), tl.load(by)
        else:
            given = tl.load(given, (row < count)[None, :] & (at < end)[:, None], 0.0)
            by = tl.load(by, (out < OUT)[:, None] & (at < end)[None, :], 0.0)
        found = tl.dot(by.to(given.dtype), given, found, input_precision="ieee")
    return found


@triton.jit
def _whole(
    rows, weight, row, out, count, OUT, IN, EACH,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the sum of all parts, in their order."""
    found = tl.zeros([OUTS, ROWS], tl.float32)
    for begin in range(0, IN, EACH):
        end = tl.minimum(begin + EACH, IN)
        found += _part(rows, weight, row, out, count, begin, end, OUT, IN, ROWS, OUTS, STEP, EVEN)
    return found


@triton.jit
def _finish(
    output, found, other, bias, scales, row, out, count, OUT,
    BIASED: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    kind = output.dtype.element_ty
    if SCALED:
        found *= tl.load(scales + out, out < OUT, 0.0)[:, None]
        if GATE >= 0:
            other *= tl.load(scales + OUT + out, out < OUT, 0.0)[:, None]
    if BIASED:
        found += tl.load(bias + out, out < OUT, 0.0).to(tl.float32)[:, None]
    if GATE >= 0:
        if BIASED:
            other += tl.load(bias + OUT + out, out < OUT, 0.0).to(tl.float32)[:, None]
        found = activated(found.to(kind).to(tl.float32), GATE) * other.to(kind).to(tl.float32)
    there = (row < count)[None, :] & (out < OUT)[:, None]
    tl.store(output + row[None, :] * OUT + out[:, None], found.to(kind), there)


@triton.jit(do_not_specialize=["count"])
def multiply_rows(
    output, rows, weight, bias, scales, sums, arrived, count, OUT, IN, EACH,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `output` `[count, OUT]` from `rows` `[count, IN]` and `weight` `[OUT, IN]`;
    with a GATE, `weight` is `[2 OUT, IN]`, gates first. With PARTS > 1, so many programs write
    their sums to float32 `sums` `[PARTS, count, OUT]`; the last that has `arrived` adds them."""
    across = tl.cdiv(OUT, OUTS)
    band = tl.program_id(0) // (TOGETHER * across) * TOGETHER
    high = tl.minimum(tl.cdiv(count, ROWS) - band, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * across)
    row = ((band + place % high) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    out = (place // high * OUTS + tl.arange(0, OUTS)).to(tl.int64)
    if PARTS == 1:
        found = _whole(rows, weight, row, out, count, OUT, IN, EACH, ROWS, OUTS, STEP, EVEN)
        other = found
        if GATE >= 0:
            weight += OUT.to(tl.int64) * IN
            other = _whole(rows, weight, row, out, count, OUT, IN, EACH, ROWS, OUTS, STEP, EVEN)
        _finish(output, found, other, bias, scales, row, out, count, OUT, BIASED, SCALED, GATE)
    else:
        begin = tl.program_id(1) * EACH
        end = tl.minimum(begin + EACH, IN)
        found = _part(rows, weight, row, out, count, begin, end, OUT, IN, ROWS, OUTS, STEP, EVEN)
        there = (row < count)[None, :] & (out < OUT)[:, None]
        partial = sums + row[None, :] * OUT + out[:, None]
        part = count.to(tl.int64) * OUT
        tl.store(partial + tl.program_id(1) * part, found, there)
        tl.debug_barrier()  # all threads must have written before one reports it
        if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived + tl.program_id(0), 0)
            found = tl.zeros([OUTS, ROWS], tl.float32)
            for each in range(PARTS):
                found += tl.load(partial + each * part, there, 0.0, cache_modifier=".cg")
            _finish(output, found, found, bias, scales, row, out, count, OUT, BIASED, SCALED, GATE)


def quantize(linear: nn.Linear, device: torch.device) -> None:
    """Make the weight int8 with `scales`, both on the device. The layer then multiplies by the
    dequantized weight with torch, as a reference, until `make_batch_invariant`."""
    weight, scales = int8_of(linear.weight.to(device))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.scales = nn.Parameter(scales, requires_grad=False)
    linear.forward = Product(linear, 0)  # type: ignore[method-assign,assignment]


class Product:
    """The forward of a linear layer: `multiply_rows` for up to `most` rows, torch beyond."""

    def __init__(self, module: nn.Linear, most: int) -> None:
        self._module, self._most = module, most
        outs, width = module.weight.shape
        parts = 1
        while triton.cdiv(outs, OUTS) * parts < PROGRAMS and width // (2 * parts) >= LEAST:
            parts *= 2
        self._each = triton.cdiv(triton.cdiv(width, parts), UNIT) * UNIT
        self._parts = triton.cdiv(width, self._each)
        tiles = max(triton.cdiv(outs, OUTS), PROGRAMS)
        self._arrived = module.weight.new_zeros(tiles, dtype=torch.int32)
        self._large = LARGE
        if module.weight.is_cuda:
            device = torch.cuda.get_device_properties(module.weight.device)
            if getattr(device, "shared_memory_per_block_optin", 0) < SHARED:
                self._large = LARGE._replace(stages=LARGE.stages - 1)

    @property
    def _scales(self) -> Tensor | None:
        return getattr(self._module, "scales", None)  # at each call: merging replaces it

    def takes(self, rows: Tensor) -> bool:
        return rows.numel() <= self._most * rows.shape[-1]

    def __call__(self, rows: Tensor) -> Tensor:
        if not self.takes(rows):
            return functional.linear(rows, self._weight(rows.dtype), self._module.bias)
        return self._multiplied(rows, len(self._module.weight), -1)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        if self._scales is None:
            return self._module.weight
        return (self._module.weight * self._scales[:, None]).to(dtype)

    def gated(self, rows: Tensor, activation: int) -> Tensor:
        """Return `triton_layers.gated` of the product; `takes` must hold."""
        return self._multiplied(rows, len(self._module.weight) // 2, activation)

    def _multiplied(self, rows: Tensor, outs: int, gate: int) -> Tensor:
        weight, bias, rows = self._module.weight, self._module.bias, rows.contiguous()
        scales = self._scales
        width = rows.shape[-1]
        output, count = rows.new_empty(*rows.shape[:-1], outs), rows.numel() // width
        tile = FLOAT32
        if rows.element_size() < 4:
            tile = next((tile for most, tile in TILES.items() if count <= most), self._large)
        tiles = triton.cdiv(count, tile.rows) * triton.cdiv(outs, tile.outs)
        split = gate < 0 and (count <= tile.rows or tiles < PROGRAMS)
        parts, sums = self._parts if split else 1, rows
        if parts > 1:
            sums = torch.empty(parts, count, outs, dtype=torch.float32, device=rows.device)
        with torch.cuda.device_of(rows):
            multiply_rows[tiles, parts](
                output, rows, weight, weight if bias is None else bias,
                weight if scales is None else scales, sums, self._arrived,
                count, outs, width, width if gate >= 0 else self._each,
                ROWS=tile.rows, OUTS=tile.outs, STEP=tile.step,
                EVEN=outs % tile.outs == 0 and width % tile.step == 0,
                PARTS=parts, BIASED=bias is not None, SCALED=scales is not None, GATE=gate,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return output
