"""Parts of a draw as separate kernels that return their intermediate results."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.triton_kernels import gumbel_of, hashed, words_of


@triton.jit
def hashed_words(out, ids, low, high, SIZE: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    words = words_of(tl.load(ids + lanes, mask=lanes < SIZE, other=0))
    found = hashed(words, low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True))
    tl.store(out + lanes, found, mask=lanes < SIZE)


@triton.jit
def noise_of(out, words, SIZE: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    given = tl.load(words + lanes, mask=lanes < SIZE, other=0)
    tl.store(out + lanes, gumbel_of(given), mask=lanes < SIZE)
