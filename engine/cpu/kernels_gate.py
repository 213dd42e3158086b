"""The gate of a Llama's inner layer, silu(gate) * up, rounded to bfloat16, as LLVM vectors. Every
number by itself, so a row has the same bits in any company."""

from __future__ import annotations

from math import e, log2
from typing import Any

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast
from engine.cpu.kernels_attention import rounded
from engine.cpu.kernels_heads import number, rounded_pair
from engine.cpu.kernels_rows import exp
from engine.cpu.kernels_softmax import power
from engine.cpu.vectors import LANES, WIDE, Emit, pointers

_BLOCK = 2 * LANES  # numbers that become a vector of words


@fast
def gate(wide: Any, inner: Any, words: Any) -> None:
    """`wide` float32 `[rows, at least 2 * inner]`, gate, then up; `words` uint32 `[rows, inner /
    2]`."""
    whole = inner // _BLOCK * _BLOCK
    for row in range(words.shape[0]):
        first = row * wide.shape[1]
        _put_gated(wide, first, first + inner, whole, words, row * words.shape[1])
        gates, ups, out = wide[row, :inner], wide[row, inner:], words[row].view(np.uint16)
        for i in range(whole, inner):
            out[i] = rounded(gates[i] / (np.float32(1) + exp(-gates[i])) * ups[i])


@intrinsic  # type: ignore[misc]
def _put_gated(
    typing: Any, wide: Any, first: Any, up: Any, count: Any, words: Any, at: Any
) -> Any:  # fmt: skip
    """`count` numbers, a multiple of _BLOCK, into `words[at:]`: `wide[first:]` are gates, and what
    they let pass is `wide[up:]`."""
    whole = types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, first, up, count, words, at = pointers(context, builder, signature, args)
        emit = Emit(builder)
        block = number(_BLOCK)
        with cgutils.for_range_slice(builder, number(0), count, block, WIDE) as (i, _):
            found = []
            for more in (0, LANES):
                places = (emit.at(builder.add(start, i), more) for start in (first, up))
                found.append(_gated(emit, *(emit.load(wide, place) for place in places)))
            there = builder.add(at, builder.lshr(i, number(1)))
            emit.store(rounded_pair(emit, *found), words, there)
        return context.get_dummy_value()

    return types.void(wide, whole, whole, whole, words, whole), generate


def _gated(emit: Emit, gate: Any, up: Any) -> Any:
    builder = emit.builder
    less = builder.fmul(gate, emit.number(-log2(e)))
    whole = builder.fadd(power(emit, less), emit.number(1.0))
    return builder.fmul(builder.fdiv(gate, whole), up)
