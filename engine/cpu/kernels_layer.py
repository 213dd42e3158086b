"""Attention of one layer of the compiled decoder in bfloat16: keys and values of all rows are kept
before any row attends. By tiles where the processor has them, else by vectors; on a machine every
row goes the same way."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu import kernels_attention
from engine.cpu.jit import HAS_TILES, fast
from engine.cpu.kernels_attention_tiles import COLUMNS, begin, finish, score, weigh
from engine.cpu.kernels_heads import put_rotated, put_rounded
from engine.cpu.kernels_scores import ROWS_AT_ONCE
from engine.cpu.kernels_softmax import LOG2_E, softmax
from engine.cpu.kernels_tiles import SIDE, end_of_tiles, room
from engine.cpu.kernels_values import SHARES


@fast
def _following(facts: Any, row: Any, most: Any) -> Any:
    """How many rows from this one on attend at once: all of one sequence, up to a limit."""
    count = 1
    while row + count < len(facts) and count < most and facts[row + count, 0] == facts[row, 0]:
        count += 1
    return count


@fast
def _keep(
    parts: Any, packed: Any, facts: Any, slots: Any, angles: Any, heads: Any, keys: Any,
    values: Any, queries: Any,
) -> None:  # fmt: skip
    """Rows of query, key and value heads."""
    (kv_heads, count, half), width = keys.shape, packed.shape[1]
    plane = count * half
    for row in range(len(packed)):
        position, first = facts[row, 1], row * width
        at = slots[facts[row, 0], position] * half
        put_rotated(
            parts, packed, first, heads, angles, position, queries, row * heads * half, half
        )
        first += 2 * heads * half
        put_rotated(parts, packed, first, kv_heads, angles, position, keys, at, plane)
        first += 2 * kv_heads * half
        put_rounded(parts, packed, first, kv_heads, angles, position, values, at, plane)


@fast
def space_of_vectors(width: Any, heads: Any, kv_heads: Any, half: Any) -> Any:
    return (
        np.empty((ROWS_AT_ONCE, width), np.float32),
        np.empty((ROWS_AT_ONCE, width), SHARES),
        np.empty(ROWS_AT_ONCE, np.float32),
        np.empty((ROWS_AT_ONCE, 2 * half), np.float32),
    )


@fast
def by_vectors(
    parts: Any, packed: Any, facts: Any, slots: Any, runs: Any, angles: Any, heads: Any,
    scaling: Any, keys: Any, values: Any, queries: Any, space: Any, out: Any,
) -> None:  # fmt: skip
    kv_heads, half = keys.shape[0], keys.shape[2]
    _keep(parts, packed, facts, slots, angles, heads, keys, values, queries)
    row = 0
    while row < len(packed):
        rows = _following(facts, row, ROWS_AT_ONCE)
        mine, count = slots[facts[row, 0]], facts[row, 1] + 1
        for head in range(heads):
            first, last, shared = head * half, (head + 1) * half, head * kv_heads // heads
            then = _next(facts, slots, keys, row, rows, heads, head)
            kernels_attention.attend(
                parts, queries[row : row + rows, first:last], keys[shared], values[shared],
                mine, count, scaling, then, space, out[row : row + rows, first:last],
            )  # fmt: skip
        row += rows


@fast
def _next(facts: Any, slots: Any, keys: Any, row: Any, rows: Any, heads: Any, head: Any) -> Any:
    """Keys, slots and number of those that are read behind a head's."""
    after, kv_heads = row + rows, len(keys)
    if head + 1 < heads:
        now, then = head * kv_heads // heads, (head + 1) * kv_heads // heads
        return keys[then], slots[facts[row, 0]], (facts[row, 1] + rows) * int(then != now)
    if after < len(facts):
        return keys[0], slots[facts[after, 0]], facts[after, 1] + 1
    return keys[0], slots[0], 0


@fast
def space_of_tiles(width: Any, heads: Any, kv_heads: Any, half: Any) -> Any:
    together = _together(heads, kv_heads)
    columns = (heads // together) * COLUMNS
    return (
        room(columns, half).ravel().view(np.uint32),
        room(columns, width).ravel(),
        room(1, width).ravel(),
        room(columns, 2 * width).ravel().view(np.uint32),
        room(1, columns).ravel(),
        room(columns, 2 * half).ravel(),
    )


@fast
def _together(heads: Any, kv_heads: Any) -> Any:
    """How many heads that share keys are columns of one product."""
    each = heads // kv_heads
    return each if each <= COLUMNS else 1


@fast
def by_tiles(
    parts: Any, packed: Any, facts: Any, slots: Any, runs: Any, angles: Any, heads: Any,
    scaling: Any, keys: Any, values: Any, queries: Any, space: Any, out: Any,
) -> None:  # fmt: skip
    _keep(parts, packed, facts, slots, angles, heads, keys, values, queries)
    together = _together(heads, keys.shape[0])
    row, known = np.int64(0), 0  # a literal would have its callees compiled twice
    while row < len(packed):
        rows = _following(facts, row, COLUMNS // together)
        if rows != known:
            begin(rows * together)
            known = rows
        which = (row, rows, heads, together)
        _score(parts, facts, slots, runs, which, keys, values, queries, space)
        _weigh(parts, facts, slots, runs, which, scaling * LOG2_E, keys, values, space, out)
        row += rows
    end_of_tiles()


@fast
def _score(
    parts: Any, facts: Any, slots: Any, runs: Any, which: Any, keys: Any, values: Any,
    queries: Any, space: Any,
) -> None:  # fmt: skip
    """Of some rows of a sequence, all heads."""
    row, rows, heads, together = which
    turned_queries, turned = space[:2]
    (kv_heads, count, half), width = keys.shape, slots.shape[1]
    columns, last, first = rows * together, facts[row, 1] + rows, facts[row, 0] * width
    if columns == 1:
        for i in range(heads * half):
            turned_queries[i] = queries[row, i]
    else:
        _turn(queries, which, half, turned_queries)
    for unit in range(heads // together):
        start = unit * together * kv_heads // heads * count * half
        score(
            parts, turned_queries, unit * columns * half, columns, keys, values, start, slots,
            first, last, runs, turned, unit * columns * width,
        )  # fmt: skip


@fast
def _turn(queries: Any, which: Any, half: Any, out: Any) -> None:
    """`[heads that share no keys, dim / 2, columns]`."""
    row, rows, heads, together = which
    columns = rows * together
    for head in range(heads):
        unit, column = divmod(head, together)
        for i in range(rows):
            first = unit * half * columns + i * together + column
            for pair in range(half):
                out[first + pair * columns] = queries[row + i, head * half + pair]


@fast
def _weigh(
    parts: Any, facts: Any, slots: Any, runs: Any, which: Any, factor: Any, keys: Any,
    values: Any, space: Any, out: Any,
) -> None:  # fmt: skip
    """All heads' scores to what they attend to."""
    row, rows, heads, together = which
    _, turned, scores, shares, scales, sums = space
    (kv_heads, count, half), width = keys.shape, slots.shape[1]
    columns, last, first = rows * together, facts[row, 1] + rows, facts[row, 0] * width
    blocks, units = (last + SIDE - 1) // SIDE, heads // together
    each = 2 * blocks * SIDE
    for unit in range(units):
        for i in range(rows):
            for j in range(together):
                column, end = i * together + j, facts[row + i, 1] + 1
                mine = unit * columns + column
                scales[mine] = softmax(
                    turned, unit * columns * width, columns, column, end, blocks, factor, scores,
                    shares, mine * each,
                )  # fmt: skip
    after, at_next, left = row + rows, 0, 0
    if after < len(facts):
        at_next, left = facts[after, 0] * width, facts[after, 1] + 1
    for unit in range(units):
        start = unit * together * kv_heads // heads * count * half
        weigh(
            parts, shares, unit * columns * each, columns, values, start, slots, first, last, runs,
            keys, (start, at_next, left), sums, unit * columns * 2 * half,
        )  # fmt: skip
    for unit in range(units):
        for i in range(rows):
            for j in range(together):
                column = i * together + j
                at = ((row + i) * heads + unit * together + j) * half
                finish(
                    parts, sums, unit * columns * 2 * half, columns, column,
                    scales[unit * columns + column], out, at,
                )  # fmt: skip


attend = by_tiles if HAS_TILES else by_vectors
space_of = space_of_tiles if HAS_TILES else space_of_vectors
