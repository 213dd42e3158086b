"""Attention over keys and values in bfloat16, written as vectors (AVX512_BF16).

A row's result is a function of its query and of its keys and values in order: the same to the bit
whoever shares the forward, in whatever blocks they lie. Sums are over products of pairs, or of
their halves, as in `engine.cpu.kernels_bfloat16`. Rows of one sequence share what is read; a key
that a row must not see has no score and weight zero. Weights are rounded where pairs are
multiplied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.kernels_scores import scoring
from engine.cpu.kernels_softmax import LOG2_E, weights
from engine.cpu.kernels_values import VALUE_ROWS, weighing

DIMS = (32, 64, 96, 128)  # of a head

_score_one, _score_two, _score = (scoring(rows) for rows in (1, 2, None))
_one, _two, _three, _four, _five = (weighing(rows) for rows in range(1, VALUE_ROWS + 1))


@fast
def attend(
    parts: Any, queries: Any, keys: Any, values: Any, slots: Any, count: Any, scaling: Any,
    then: Any, space: Any, out: Any,
) -> None:  # fmt: skip
    """One head of up to ROWS_AT_ONCE rows that follow one another in a sequence. `queries` and
    `out` words `[rows, dim / 2]`; `keys` and `values` words `[slots, dim / 2]`, of which the first
    row sees `slots[:count]`, each next one more. `slots` and the `space` reach to a multiple of
    LANES that all rows' keys fit in; `parts` is a tuple of `dim / 32` numbers. `then`: keys, slots
    and number of those that are read next, which are asked for."""
    scores, shares, totals, sums = space
    rows, last, width = len(queries), count + len(queries) - 1, shares.shape[1]
    shape = (rows, queries.strides[0] // 4, count, width)
    if rows == 1:
        _score_one(parts, queries, shape, keys, values, slots, scores, totals)
    elif rows == 2:
        _score_two(parts, queries, shape, keys, values, slots, scores, totals)
    else:
        _score(parts, queries, shape, keys, values, slots, scores, totals)
    for row in range(rows):
        end = count + row
        totals[row] = weights(scores, row * width, end, totals[row], scaling * LOG2_E, shares)
        shares[row, end : last + 1] = 0
    first, (next_keys, next_slots, ahead) = 0, then
    while first < rows:
        left = rows - first
        some = left if left <= VALUE_ROWS else (left + 1) // 2
        ahead = ahead if first == 0 else 0
        _some(
            some, parts, shares[first:], width, values, slots, last, next_keys, next_slots, ahead,
            sums[first:],
        )  # fmt: skip
        first += some
    for row in range(rows):
        scale, halves = np.float32(1) / totals[row], out[row].view(np.uint16)
        for i in range(len(halves)):
            halves[i] = rounded(sums[row, i] * scale)


@fast
def _some(
    rows: Any, parts: Any, shares: Any, width: Any, values: Any, slots: Any, count: Any, keys: Any,
    then: Any, left: Any, sums: Any,
) -> None:  # fmt: skip
    if rows == 1:
        _one(parts, shares, width, values, slots, count, keys, then, left, sums)
    elif rows == 2:
        _two(parts, shares, width, values, slots, count, keys, then, left, sums)
    elif rows == 3:
        _three(parts, shares, width, values, slots, count, keys, then, left, sums)
    elif rows == 4:
        _four(parts, shares, width, values, slots, count, keys, then, left, sums)
    else:
        _five(parts, shares, width, values, slots, count, keys, then, left, sums)


@fast
def rounded(number: Any) -> Any:
    """float32 to bfloat16, to nearest, ties to even."""
    bits = np.float32(number).view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + up) >> np.uint32(16))
