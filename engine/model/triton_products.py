"""Batch-invariant products in Triton: a row's bits do not depend on the other rows.

Each output is a sum over the inputs, in parts that depend only on the weight's shape. The number of
rows decides only the tile, and whether each part has its own program. Libraries, in contrast, let
the number of rows decide how a sum is split.

Weights may be quantized: int8 (sign and magnitude), fp8 (e4m3) or int4 (8 more than the weight),
with a float32 scale per output and group of 128 inputs, which multiplies the group's sum. Words of
16 bits hold a group's weights: of int4, word `j` of 32 holds those of inputs `j`, `j + 32`,
`j + 64` and `j + 96`, lowest bits first. Words lie in registers as bfloat16 would, so a few
operations on their bits give weights for the matrix instruction: the bits go to where the wider
format has its sign, exponent and fraction. There they mean a smaller number, since its exponents
are biased by more, and integers become subnormal; a product by a power of 2 makes them normal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from engine.config import QuantizationName
from engine.model.triton_layers import activated

TOGETHER = tl.constexpr(8)  # row tiles that run together, to read a weight once from memory
PROGRAMS = {"none": 256, "int8": 384, "fp8": 384, "int4": 512}  # at least: few rows' sums split
OUTS, LEAST = 64, 1024  # outputs per tile; inputs per part, at least
GROUP = tl.constexpr(128)  # inputs that share a scale; a part's are a multiple
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": -8.0}  # what a group's largest weight becomes
WEIGHTS = {"int8": 2, "fp8": 2, "int4": 4}  # in a word
SOME = 1024  # outputs that are quantized together: it takes 15 times their memory


class Tile(NamedTuple):
    """The size of a program. `step`: inputs per iteration."""

    rows: int
    outs: int
    step: int
    warps: int
    stages: int


# By the most rows of a product. `outs` are multiples of 64: all use the same matrix instruction.
MOST, FILLED = 1 << 62, 256  # rows, no limit; tiles: with fewer, sums are split, too
TILES = {
    16: Tile(16, 64, 128, 4, 4), 32: Tile(32, 64, 128, 4, 4), 64: Tile(64, 64, 64, 4, 5),
    256: Tile(64, 128, 64, 8, 4), MOST: Tile(128, 128, 64, 8, 4),
}  # fmt: skip
QUANTIZED = {
    16: Tile(16, 64, 128, 4, 3), 32: Tile(32, 64, 128, 4, 3), 256: Tile(64, 64, 128, 4, 3),
    MOST: Tile(128, 64, 128, 4, 3),
}  # fmt: skip
FLOAT32 = Tile(64, 64, 16, 4, 3)
SHARED = 1 << 17  # bytes of shared memory that the last tiles need; with less, a stage fewer


@triton.jit
def _shifted(words, NIBBLES: tl.constexpr, PAIRS: tl.constexpr):
    """Shift to the right, or left if negative, by so many times 4 bits. PAIRS: two words at once;
    bits then move from one to the other."""
    if not PAIRS:
        return words << (-4 * NIBBLES) if NIBBLES < 0 else words >> (4 * NIBBLES)
    by: tl.constexpr = "shl.b32 $0, $1, 4;" if NIBBLES < 0 else "shr.b32 $0, $1, 4;"
    for _ in tl.static_range(-NIBBLES if NIBBLES < 0 else NIBBLES):
        words = tl.inline_asm_elementwise(by, "=r,r", [words], tl.int16, is_pure=True, pack=2)
    return words


@triton.jit
def _weights(words, AT: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Return weight AT of each word exactly; of integers 2**-13 times it, or 2**-9 in float16."""
    PAIRS: tl.constexpr = dtype == tl.bfloat16
    HALF: tl.constexpr = tl.bfloat16 if PAIRS else tl.float16
    if KIND == "int4":
        found = _shifted(words, AT, PAIRS) & 15
    else:
        sign = (words if AT else _shifted(words, -2, PAIRS)) & -32768
        if KIND == "int8":
            found = (_shifted(words, 2 * AT, PAIRS) & 127) | sign
        elif PAIRS:
            found = (_shifted(words, 2 * AT - 1, PAIRS) & 0x07F0) | sign
        else:
            found = ((_shifted(words, 2 * AT, PAIRS) & 127) << 7) | sign
    factor = 2.0**120 if PAIRS else 2.0**8 if KIND == "fp8" else 2.0**15
    added = 0.0 if KIND != "int4" else -(2.0**-10) if PAIRS else -(2.0**-6)  # takes 8 off
    factor, added = tl.full(found.shape, factor, HALF), tl.full(found.shape, added, HALF)
    found = tl.fma(found.to(HALF, bitcast=True), factor, added)  # one instruction for two weights
    return found.to(dtype)


@triton.jit
def _given(rows, row, count, at, end, IN, EVEN: tl.constexpr):
    mask = (row < count)[None, :]
    if not EVEN:
        mask = mask & (at < end)[:, None]
    return tl.load(rows + row[None, :] * IN + at[:, None], mask, 0.0)


@triton.jit
def _part(
    rows, weight, scales, row, out, count, begin, end, OUT, IN,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Return the sums over inputs `begin .. end`, `[OUTS, ROWS]`."""
    found = tl.zeros([OUTS, ROWS], tl.float32)
    if KIND == "none":
        for first in range(begin, end, STEP):
            at = first + tl.arange(0, STEP)
            by = weight + out[:, None] * IN + at[None, :]
            if EVEN:
                by = tl.load(by)
            else:
                by = tl.load(by, (out < OUT)[:, None] & (at < end)[None, :], 0.0)
            given = _given(rows, row, count, at, end, IN, EVEN)
            found = tl.dot(by, given, found, input_precision="ieee")
    else:
        WORDS: tl.constexpr = 32 if KIND == "int4" else 64
        groups = tl.cdiv(IN, GROUP)
        for group in range(begin // GROUP, tl.cdiv(end, GROUP)):
            word = tl.arange(0, WORDS)
            words = weight + out[:, None] * (groups * WORDS) + (word + group * WORDS)[None, :]
            words = tl.load(words) if EVEN else tl.load(words, (out < OUT)[:, None], 0)
            scale = tl.load(scales + out * groups + group, out < OUT, 0.0)
            sums = tl.zeros([OUTS, ROWS], tl.float32)
            for at in tl.static_range(GROUP // WORDS):
                given = _given(rows, row, count, word + group * GROUP + at * WORDS, end, IN, EVEN)
                by = _weights(words, at, KIND, given.dtype)
                sums = tl.dot(by, given, sums, input_precision="ieee")
            if KIND != "fp8":
                scale *= 2.0**13 if rows.dtype.element_ty == tl.bfloat16 else 2.0**9
            found += sums * scale[:, None]
    return found


@triton.jit
def _whole(
    rows, weight, scales, row, out, count, OUT, IN, EACH,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Return the sum of all parts, in their order."""
    found = tl.zeros([OUTS, ROWS], tl.float32)
    for begin in range(0, IN, EACH):
        end = tl.minimum(begin + EACH, IN)
        found += _part(
            rows, weight, scales, row, out, count, begin, end, OUT, IN,
            ROWS, OUTS, STEP, EVEN, KIND,
        )  # fmt: skip
    return found


@triton.jit
def _finish(
    output, found, other, bias, row, out, count, OUT, BIASED: tl.constexpr, GATE: tl.constexpr
):
    kind = output.dtype.element_ty
    if BIASED:
        found += tl.load(bias + out, out < OUT, 0.0).to(tl.float32)[:, None]
    if GATE >= 0:
        if BIASED:
            other += tl.load(bias + OUT + out, out < OUT, 0.0).to(tl.float32)[:, None]
        found = activated(found.to(kind).to(tl.float32), GATE) * other.to(kind).to(tl.float32)
    mask = (row < count)[None, :] & (out < OUT)[:, None]
    tl.store(output + row[None, :] * OUT + out[:, None], found.to(kind), mask)


@triton.jit
def _sum_of(partial, part, mask, FIRST: tl.constexpr, END: tl.constexpr):
    """Return the sum of the parts from FIRST to END, in order, each `part` numbers long."""
    found = tl.zeros(mask.shape, tl.float32)
    for each in range(FIRST, END):
        found += tl.load(partial + each * part, mask, 0.0, cache_modifier=".cg")
    return found


@triton.jit(do_not_specialize=["count"])
def multiply_rows(
    output, rows, weight, bias, scales, sums, arrived, count, OUT, IN, EACH,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, BIASED: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `output` `[count, OUT]` from `rows` `[count, IN]` and `weight` `[OUT, IN]`,
    or words of a quantized KIND; with a GATE, `weight` is `[2 OUT, IN]`, gates first. With
    PARTS > 1, so many programs write their sums to float32 `sums` `[PARTS, count, OUT]`, with a
    GATE half of them those of gates; the last that has `arrived` adds them."""
    across = tl.cdiv(OUT, OUTS)
    band = tl.program_id(0) // (TOGETHER * across) * TOGETHER
    high = tl.minimum(tl.cdiv(count, ROWS) - band, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * across)
    row = ((band + place % high) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    out = (place // high * OUTS + tl.arange(0, OUTS)).to(tl.int64)
    groups = tl.cdiv(IN, GROUP)
    words = IN if KIND == "none" else groups * (32 if KIND == "int4" else 64)
    others = OUT.to(tl.int64) * words if GATE >= 0 else 0
    if PARTS == 1:
        found = _whole(
            rows, weight, scales, row, out, count, OUT, IN, EACH, ROWS, OUTS, STEP, EVEN, KIND
        )
        other = found
        if GATE >= 0:
            other = _whole(
                rows, weight + others, scales + OUT * groups, row, out, count, OUT, IN, EACH,
                ROWS, OUTS, STEP, EVEN, KIND,
            )  # fmt: skip
        _finish(output, found, other, bias, row, out, count, OUT, BIASED, GATE)
    else:
        OWN: tl.constexpr = PARTS // 2 if GATE >= 0 else PARTS
        half, begin = tl.program_id(1) // OWN, tl.program_id(1) % OWN * EACH
        end = tl.minimum(begin + EACH, IN)
        found = _part(
            rows, weight + half * others, scales + half * OUT * groups, row, out, count, begin, end,
            OUT, IN, ROWS, OUTS, STEP, EVEN, KIND,
        )  # fmt: skip
        mask = (row < count)[None, :] & (out < OUT)[:, None]
        partial = sums + row[None, :] * OUT + out[:, None]
        part = count.to(tl.int64) * OUT
        tl.store(partial + tl.program_id(1) * part, found, mask)
        tl.debug_barrier()  # all threads must have written before one reports it
        if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived + tl.program_id(0), 0)
            found = _sum_of(partial, part, mask, 0, OWN)
            other = _sum_of(partial, part, mask, OWN, PARTS)
            _finish(output, found, other, bias, row, out, count, OUT, BIASED, GATE)


def quantize(linear: Any, device: torch.device, kind: QuantizationName) -> None:
    """Replace the weight by words `[OUT, groups * words]` and `scales` `[OUT, groups]` on the
    device. The layer then multiplies by the dequantized weight with torch, as a reference, until
    `make_batch_invariant`."""
    parts = linear.weight.split(SOME)
    words, scales = zip(*(_packed(part.to(device).float(), kind) for part in parts), strict=True)
    linear.weight = nn.Parameter(torch.cat(words), requires_grad=False)
    linear.scales = nn.Parameter(torch.cat(scales), requires_grad=False)
    linear.quantization = kind
    linear.forward = Product(linear, 0)


def _packed(weight: Tensor, kind: QuantizationName) -> tuple[Tensor, Tensor]:
    """Return words and scales of a float32 weight."""
    size, per = GROUP.value, WEIGHTS[kind]
    groups = functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = torch.where(largest == 0, 1.0, largest / LARGEST[kind])
    numbers = groups / scales
    if kind == "fp8":
        numbers = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    elif kind == "int8":
        numbers = numbers.round().abs() + 128 * (numbers < 0)
    else:
        numbers = numbers.round().clamp(max=7) + 8
    bits = 16 // per
    fields = (numbers.int() & (1 << bits) - 1).unflatten(-1, (per, -1))
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=weight.device)[:, None]
    words = (fields << shifts).sum(-2, dtype=torch.int32)
    return words.short().flatten(1), scales.squeeze(-1)


def dequantized(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight `[OUT, IN]` of a quantized layer."""
    pairs = zip(linear.weight.split(SOME), linear.scales.split(SOME), strict=True)
    parts = [_unpacked(*pair, linear.quantization).to(dtype) for pair in pairs]
    return torch.cat(parts)[:, : linear.in_features]


def _unpacked(words: Tensor, scales: Tensor, kind: QuantizationName) -> Tensor:
    """Return the float32 weight of words and scales, padded to whole groups."""
    words, bits = words.int().unflatten(1, (scales.shape[1], -1)), 16 // WEIGHTS[kind]
    fields = torch.cat([words >> at & (1 << bits) - 1 for at in range(0, 16, bits)], -1)
    if kind == "fp8":
        numbers = fields.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif kind == "int8":
        numbers = (fields & 127) * (1.0 - 2.0 * (fields > 127))
    else:
        numbers = fields - 8.0
    return (numbers * scales[..., None]).flatten(1)


class Product:
    """The forward of a linear layer: `multiply_rows` for up to `most` rows, torch beyond."""

    def __init__(self, module: Any, most: int) -> None:
        self._module, self._most = module, most
        outs, width = len(module.weight), module.in_features
        self._kind: QuantizationName = getattr(module, "quantization", "none")
        parts, tiles = 1, triton.cdiv(outs, OUTS)
        while tiles * parts < PROGRAMS[self._kind] and width // (2 * parts) >= LEAST:
            parts *= 2
        group = GROUP.value
        self._each = triton.cdiv(triton.cdiv(width, parts), group) * group
        self._parts = triton.cdiv(width, self._each)
        self._arrived = module.weight.new_zeros(max(tiles, FILLED), dtype=torch.int32)
        self._tiles = dict(TILES if self._kind == "none" else QUANTIZED)
        if module.weight.is_cuda:
            device = torch.cuda.get_device_properties(module.weight.device)
            if getattr(device, "shared_memory_per_block_optin", 0) < SHARED:
                last = self._tiles[MOST]
                self._tiles[MOST] = last._replace(stages=last.stages - 1)

    def takes(self, rows: Tensor) -> bool:
        return rows.numel() <= self._most * rows.shape[-1]

    def __call__(self, rows: Tensor) -> Tensor:
        module = self._module
        if self.takes(rows):
            return self._multiplied(rows, len(module.weight), -1)
        weight = module.weight if self._kind == "none" else dequantized(module, rows.dtype)
        return functional.linear(rows, weight, module.bias)

    def gated(self, rows: Tensor, activation: int) -> Tensor:
        """Return `triton_layers.gated` of the product; `takes` must hold."""
        return self._multiplied(rows, len(self._module.weight) // 2, activation)

    def _multiplied(self, rows: Tensor, outs: int, gate: int) -> Tensor:
        weight, bias, rows = self._module.weight, self._module.bias, rows.contiguous()
        quantized, width = self._kind != "none", rows.shape[-1]
        output, count = rows.new_empty(*rows.shape[:-1], outs), rows.numel() // width
        tile = next(tile for most, tile in self._tiles.items() if count <= most)
        if rows.element_size() == 4 and not quantized:
            tile = FLOAT32
        tiles = triton.cdiv(count, tile.rows) * triton.cdiv(outs, tile.outs)
        split = count <= tile.rows or tiles < FILLED
        parts, sums = self._parts if split else 1, rows
        if gate >= 0 and (parts > 1 or split and quantized):
            parts *= 2
        if parts > 1:
            sums = torch.empty(parts, count, outs, dtype=torch.float32, device=rows.device)
        with torch.cuda.device_of(rows):
            multiply_rows[tiles, parts](
                output, rows, weight, weight if bias is None else bias,
                self._module.scales if quantized else weight, sums, self._arrived,
                count, outs, width, self._each,
                ROWS=tile.rows, OUTS=tile.outs, STEP=tile.step,
                EVEN=outs % tile.outs == 0 and width % tile.step == 0,
                PARTS=parts, BIASED=bias is not None, GATE=gate, KIND=self._kind,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return output
