"""Products whose rows have the same bits whatever rows share them, in Triton.

One tile serves any number of rows, and every number of the result is one sum over the inputs in
their order. Libraries choose tiles, and how a sum is split, by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

ROWS, OUTS = 64, 64  # of a tile
STEPS = {4: 16}  # inputs added at once, by bytes of a number
STEP = 64  # of others
TOGETHER = tl.constexpr(8)  # tiles of rows that share what is read of a weight
OPTIONS = {"num_warps": 4, "num_stages": 3}


@triton.jit(do_not_specialize=["count"])
def multiply_rows(
    output, rows, weight, bias, count, OUT: tl.constexpr, IN: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """A tile of `output` `[count, OUT]` of `rows` `[count, IN]` and a `weight` `[OUT, IN]`."""
    ACROSS: tl.constexpr = (OUT + OUTS - 1) // OUTS
    band = tl.program_id(0) // (TOGETHER * ACROSS) * TOGETHER
    high = tl.minimum(tl.cdiv(count, ROWS) - band, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * ACROSS)
    row = ((band + place % high) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    out = (place // high * OUTS + tl.arange(0, OUTS)).to(tl.int64)
    step = tl.arange(0, STEP)
    found = tl.zeros([ROWS, OUTS], tl.float32)
    for at in range(0, IN, STEP):
        there = (at + step < IN)[None, :]
        given = tl.load(
            rows + row[:, None] * IN + at + step[None, :], (row < count)[:, None] & there, 0.0
        )
        by = tl.load(
            weight + out[:, None] * IN + at + step[None, :], (out < OUT)[:, None] & there, 0.0
        )
        found = tl.dot(given, tl.trans(by), found, input_precision="ieee")
    if BIASED:
        found += tl.load(bias + out, out < OUT, 0.0).to(tl.float32)[None, :]
    there = (row < count)[:, None] & (out < OUT)[None, :]
    tl.store(output + row[:, None] * OUT + out[None, :], found.to(output.dtype.element_ty), there)


def multiplied(module: nn.Linear, rows: Tensor) -> Tensor:
    """What the layer makes of `[..., in]`."""
    (outs, width), rows = module.weight.shape, rows.contiguous()
    output = rows.new_empty(*rows.shape[:-1], outs)
    count = rows.numel() // width
    biased = module.bias is not None
    with torch.cuda.device_of(rows):
        multiply_rows[triton.cdiv(count, ROWS) * triton.cdiv(outs, OUTS),](
            output, rows, module.weight, module.bias if biased else rows, count,
            OUT=outs, IN=width, ROWS=ROWS, OUTS=OUTS, STEP=STEPS.get(rows.element_size(), STEP),
            BIASED=biased, **OPTIONS,
        )  # fmt: skip
    return output
