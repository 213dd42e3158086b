"""Products of rows in bfloat16: packed weights, and which of its instructions a processor takes.

Tiles (AMX) where there are some (`engine.cpu.kernels_tiles`), else vectors
(`engine.cpu.kernels_streams`). For those one instruction takes pairs of inputs (AVX512_BF16): on
AMD's processors it makes twice as many products a second as float32 arithmetic, on Intel's half as
many (Emerald Rapids at 2.9 GHz: 43 and 91 thousand million), so there pairs are taken apart into
float32, which is exact. Rows are rounded to bfloat16 first, as everywhere in that precision. A
row's sums run over the inputs in order whoever its neighbours are, so its result is the same to the
bit in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cpu.jit import HAS_TILES, fast
from engine.cpu.kernels_streams import PANEL, by_vectors
from engine.cpu.kernels_tiles import SIDE, product_of_tiles
from engine.cpu.vectors import SLOW_PAIRS

Words = npt.NDArray[np.uint32]

_LINE = 16  # float32


def pack(weight: Tensor) -> Words:
    """`[out, in]`, `in` even -> `[panels, in / 2, PANEL]`. A word holds an output's weights for two
    inputs, the first in its low half; missing outputs are zero."""
    outputs, inputs = weight.shape
    assert inputs % 2 == 0
    bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    full = np.zeros((padded(outputs), inputs), dtype=np.uint16)
    full[:outputs] = bits
    words = full.view(np.uint32).reshape(-1, PANEL, inputs // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def padded(outputs: int) -> int:
    """Columns that a product with so many outputs writes."""
    return -(-outputs // PANEL) * PANEL


@fast
def product(x: Any, space: Any, words: Any, y: Any) -> None:
    """`x` float32 `[rows, in]`, rounded into `space` uint32 `[rows, in / 2]`; `words` of `pack`;
    `y` float32 `[rows, padded(out)]`: y = x W'."""
    for row in range(x.shape[0]):
        _round(x[row], space[row])
    product_of_pairs(space, words, y)


@fast
def product_of_pairs(x: Any, words: Any, y: Any) -> None:
    """The same of rows that are rounded: `x` uint32 `[rows, in / 2]`."""
    if HAS_TILES and x.shape[1] % SIDE == 0:
        product_of_tiles(x, words, y)
    elif SLOW_PAIRS:
        by_vectors(taken_apart(x), x.shape[1], words, y)
    else:
        by_vectors(x, x.shape[1], words, y)


@fast
def taken_apart(x: Any) -> Any:
    """Pairs of bfloat16 as pairs of float32. Behind each row is a cache line: of rows whose length
    is a power of two the first cache could not hold as many as are read together."""
    rows, pairs = x.shape
    found = np.empty((rows, 2 * pairs + _LINE), np.float32)
    low, high = np.uint64(0xFFFF), np.uint64(0xFFFF0000)
    for row in range(rows):
        mine, out = x[row], found[row].view(np.uint64)
        for i in range(pairs):
            pair = np.uint64(mine[i])
            out[i] = (pair & low) << np.uint64(16) | (pair & high) << np.uint64(32)
    return found


@fast
def _round(row: Any, out: Any) -> None:
    """float32 to pairs of bfloat16, to nearest, ties to even."""
    bits = row.view(np.uint32)
    one, half, low = np.uint32(1), np.uint32(0x7FFF), np.uint32(16)
    for i in range(out.shape[0]):
        a, b = bits[2 * i], bits[2 * i + 1]
        a = (a + half + ((a >> low) & one)) >> low
        b = (b + half + ((b >> low) & one)) >> low
        out[i] = a | (b << low)
