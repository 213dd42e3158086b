"""Compiled attention of a few rows over paged keys and values, on one thread.

Keys and values are read where they lie, once for all rows and query heads that share them
(grouped-query attention, arXiv:2305.13245), in tiles of 32, with an online softmax
(arXiv:1805.02867) and all sums in float32. A tile's keys are turned into a buffer that stays in the
first cache, so that a vector holds sixteen keys at one depth and no sum runs across lanes.

A row's sums run over its own sequence's keys in order, in tiles counted from key 0; a key that it
may not see has weight zero, which changes no bit. So its result is the same to the bit whatever
rows and sequences share the call. A key that is not a number spoils its own sequence only.

Everything is 32 bits wide: a float32 or a pair of bfloat16. Pairs are multiplied by the instruction
for them (AVX512_BF16; queries and weights are rounded to bfloat16 then, as everywhere in that
precision) or widened to float32, tile by tile. Sums of pairs stand in another order of columns:
the even ones, then the odd ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.tile_pieces import TILE, fetch, scores_of, softmax_of, turn, values_of
from engine.cpu.vectors import LANES, multiplies_pairs

SINGLE, PAIRED, WIDENED = range(3)  # float32; pairs of bfloat16, multiplied as such; or not
MOST_ROWS = 64  # of a span: bits in a mask
GROUP = 4  # queries whose sums fit the registers
AHEAD = 4 * TILE  # keys; memory is asked so far ahead
SHORT = 512  # keys that may still be in the caches
LOWEST = np.float32(-3e38)  # below every score; finite, so that lowest - lowest is 0

_HERE = multiplies_pairs()  # elsewhere that code would not compile; nothing calls it there
_score_1, _score_4 = (scores_of(n, pairs=False) for n in (1, GROUP))
_score_pairs_1, _score_pairs_4 = (scores_of(n, pairs=_HERE) for n in (1, GROUP))
_softmax_1, _softmax_4 = softmax_of(1), softmax_of(GROUP)
_wide_1, _wide_4 = (values_of(n, 4, pairs=False) for n in (1, GROUP))
_narrow_1, _narrow_4 = (values_of(n, 1, pairs=False) for n in (1, GROUP))
_wide_pairs_1, _wide_pairs_4 = (values_of(n, 4, pairs=_HERE) for n in (1, GROUP))
_narrow_pairs_1, _narrow_pairs_4 = (values_of(n, 1, pairs=_HERE) for n in (1, GROUP))


@fast
def attend(
    query: Any, key: Any, value: Any, facts: Any, seen: Any, tables: Any, block_size: Any,
    scaling: Any, kind: Any, keys: Any, values: Any, out: Any,
) -> None:  # fmt: skip
    """Write `key` and `value` `[1, kv_heads, rows, dim]` to their slots of `keys` and `values`
    `[kv_heads, slots, words]`, then attend with `query` `[1, heads, rows, dim]`; `out`
    `[rows, heads, dim]`. Words are uint32, the rest float32. `facts` `[spans, 3]`: first row, rows,
    KV index of the first. `tables` `[spans, blocks]`. Bit i of `seen[row]`: whether it sees the key
    of its span's i-th row; earlier keys it does."""
    query = query[0]
    write(key[0], facts, tables, block_size, kind, keys)
    write(value[0], facts, tables, block_size, kind, values)
    (heads, _, dim), words = query.shape, keys.shape[2]
    group = heads // keys.shape[0]
    most = facts[:, 1].max() * group + GROUP  # queries of a head of keys, filled up
    asked = np.zeros((most, words if kind == PAIRED else dim), np.uint32)
    sums = np.empty((most, dim), np.float32)
    peaks, totals = np.empty((most, LANES), np.float32), np.empty((most, LANES), np.float32)
    scores, fades = np.empty((GROUP, TILE), np.float32), np.empty((GROUP, LANES), np.float32)
    turned, wide = np.empty((dim, TILE), np.uint32), np.empty((TILE, dim), np.uint32)
    rows_of_wide = np.arange(TILE) * dim
    for span in range(facts.shape[0]):
        first, rows, start = facts[span]
        end, count = start + rows, group * rows
        found = _places(tables[span], block_size, end, words)
        for head in range(keys.shape[0]):
            for i in range(count):
                _ask(query[head * group + i // rows, first + i % rows], kind, asked[i])
            sums[:count] = 0
            peaks[:count] = LOWEST
            totals[:count] = 0
            for tile in range(0, end, TILE):
                slots = found[tile : tile + TILE]
                later = found[tile + AHEAD : tile + AHEAD + TILE]
                if end > SHORT:
                    _fetch(keys[head].reshape(-1), later, words)
                    _fetch(values[head].reshape(-1), later, words)
                _turn_keys(keys[head], slots, kind, wide, rows_of_wide, turned)
                plane, places = values[head].reshape(-1), slots
                if kind != SINGLE:
                    _stage_values(values[head].reshape(-1), slots, kind, wide)
                    plane, places = wide.reshape(-1), rows_of_wide
                for i in range(0, count, GROUP):
                    some = 1 if count == 1 else GROUP
                    _score(some, kind, asked[i:], turned, scores)
                    if tile + TILE > start:
                        for j in range(min(some, count - i)):
                            _hide(scores[j], seen[first + (i + j) % rows], tile, start, end)
                    _weigh(some, scores, scaling, peaks[i:], totals[i:], fades)
                    _add(some, kind, scores, fades, plane, places, sums[i:])
            for i in range(count):
                mine = out[first + i % rows, head * group + i // rows]
                _answer(sums[i], totals[i], kind, mine)


@fast
def write(rows: Any, facts: Any, tables: Any, block_size: Any, kind: Any, plane: Any) -> None:
    """`rows` float32 `[kv_heads, rows, dim]` to their slots of `plane` `[kv_heads, slots, words]`,
    rounded to nearest, ties to even, where that holds pairs."""
    for span in range(facts.shape[0]):
        first, count, start = facts[span]
        for row in range(count):
            at = start + row
            slot = tables[span, at // block_size] * block_size + at % block_size
            for head in range(plane.shape[0]):
                _words(rows[head, first + row], kind != SINGLE, plane[head, slot])


@fast
def _words(row: Any, pairs: Any, out: Any) -> None:
    bits = row.view(np.uint32)
    if not pairs:
        out[:] = bits
        return
    for i in range(out.shape[0]):
        out[i] = (_rounded(bits[2 * i]) >> np.uint32(16)) | _rounded(bits[2 * i + 1])


@fast
def _rounded(bits: Any) -> Any:
    """Of a float32, to bfloat16, in the upper half. A NaN stays one."""
    low = (bits >> np.uint32(16)) & np.uint32(1)
    number = (bits + np.uint32(0x7FFF) + low) & np.uint32(0xFFFF0000)
    return np.uint32(0x7FC00000) if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else number


@fast
def _ask(query: Any, kind: Any, out: Any) -> None:
    """A query in the order of columns in which keys are turned."""
    if kind != WIDENED:
        _words(query, kind == PAIRED, out)
        return
    bits, half = query.view(np.uint32), len(query) // 2
    for i in range(half):
        out[i], out[half + i] = bits[2 * i], bits[2 * i + 1]


@fast
def _places(table: Any, block_size: Any, end: Any, words: Any) -> Any:
    """Where keys begin in a head's plane; to fill the last tile, the last key once more."""
    out = np.empty((end + TILE - 1) // TILE * TILE, np.int64)
    for first in range(0, end, block_size):
        slot = table[first // block_size] * block_size
        for i in range(min(block_size, end - first)):
            out[first + i] = (slot + i) * words
    out[end:] = out[end - 1]
    return out


@fast
def _fetch(plane: Any, slots: Any, words: Any) -> None:
    """Processors foresee two streams badly: 32,000 keys took 10.2 ms instead of 6.9 without."""
    for i in range(len(slots)):
        for word in range(0, words, LANES):
            fetch(plane, slots[i] + word)


@fast
def _turn_keys(
    plane: Any, slots: Any, kind: Any, wide: Any, rows_of_wide: Any, turned: Any
) -> None:
    flat, depth = plane.reshape(-1), plane.shape[1]
    if kind == WIDENED:
        for j in range(TILE):
            _widen(flat[slots[j] : slots[j] + depth], wide[j])
        turn(wide.reshape(-1), rows_of_wide, wide.shape[1], turned, 0)
        turn(wide.reshape(-1), rows_of_wide, wide.shape[1], turned, LANES)
    else:
        turn(flat, slots, depth, turned, 0)
        turn(flat, slots, depth, turned, LANES)


@fast
def _widen(pairs: Any, out: Any) -> None:
    half = len(pairs)
    for i in range(half):
        out[i] = pairs[i] << np.uint32(16)
        out[half + i] = pairs[i] & np.uint32(0xFFFF0000)


@fast
def _stage_values(plane: Any, slots: Any, kind: Any, wide: Any) -> None:
    """A tile's values: widened, or as pairs of the same column of keys j and 16 + j."""
    half = wide.shape[1] // 2
    if kind == WIDENED:
        for j in range(TILE):
            _widen(plane[slots[j] : slots[j] + half], wide[j])
        return
    for j in range(LANES):
        low = plane[slots[j] : slots[j] + half]
        high = plane[slots[LANES + j] : slots[LANES + j] + half]
        out = wide[j]
        for i in range(half):
            out[i] = (low[i] & np.uint32(0xFFFF)) | (high[i] << np.uint32(16))
            out[half + i] = (low[i] >> np.uint32(16)) | (high[i] & np.uint32(0xFFFF0000))


@fast
def _score(some: Any, kind: Any, asked: Any, turned: Any, scores: Any) -> None:
    depth = asked.shape[1]
    if kind == PAIRED:
        if some == 1:
            _score_pairs_1(asked, depth, turned, scores)
        else:
            _score_pairs_4(asked, depth, turned, scores)
    elif some == 1:
        _score_1(asked, depth, turned, scores)
    else:
        _score_4(asked, depth, turned, scores)


@fast
def _hide(scores: Any, seen: Any, tile: Any, start: Any, end: Any) -> None:
    """Keys that a row may not see, and those beyond the end."""
    for i in range(max(0, start - tile), TILE):
        at = tile + i
        if at >= end or not (seen >> np.uint64(at - start)) & np.uint64(1):
            scores[i] = -np.inf


@fast
def _weigh(some: Any, scores: Any, scaling: Any, peaks: Any, totals: Any, fades: Any) -> None:
    if some == 1:
        _softmax_1(scores, scaling, peaks, totals, fades)
    else:
        _softmax_4(scores, scaling, peaks, totals, fades)


@fast
def _add(some: Any, kind: Any, scores: Any, fades: Any, plane: Any, places: Any, sums: Any) -> None:
    """A tile's weighted values to the sums of some queries."""
    width = sums.shape[1]
    if kind == PAIRED:
        weights = np.empty((GROUP, LANES), np.uint32)
        bits = scores.view(np.uint32)
        for row in range(some):
            for j in range(LANES):
                low = _rounded(bits[row, j]) >> np.uint32(16)
                weights[row, j] = low | _rounded(bits[row, LANES + j])
        _add_pairs(some, weights, fades, plane, places, sums)
        return
    column = 0
    while column < width:
        if column + 4 * LANES <= width:
            if some == 1:
                _wide_1(scores, TILE, fades, plane, places, sums, width, column)
            else:
                _wide_4(scores, TILE, fades, plane, places, sums, width, column)
            column += 4 * LANES
        else:
            if some == 1:
                _narrow_1(scores, TILE, fades, plane, places, sums, width, column)
            else:
                _narrow_4(scores, TILE, fades, plane, places, sums, width, column)
            column += LANES


@fast
def _add_pairs(some: Any, weights: Any, fades: Any, plane: Any, places: Any, sums: Any) -> None:
    width, column = sums.shape[1], 0
    while column < width:
        if column + 4 * LANES <= width:
            if some == 1:
                _wide_pairs_1(weights, LANES, fades, plane, places, sums, width, column)
            else:
                _wide_pairs_4(weights, LANES, fades, plane, places, sums, width, column)
            column += 4 * LANES
        else:
            if some == 1:
                _narrow_pairs_1(weights, LANES, fades, plane, places, sums, width, column)
            else:
                _narrow_pairs_4(weights, LANES, fades, plane, places, sums, width, column)
            column += LANES


@fast
def _answer(sums: Any, totals: Any, kind: Any, out: Any) -> None:
    """The weighted mean, columns in their order."""
    total = np.float32(0)
    for lane in range(LANES):
        total += totals[lane]
    if kind == SINGLE:
        for i in range(len(out)):
            out[i] = sums[i] / total
        return
    half = len(out) // 2
    for i in range(half):
        out[2 * i], out[2 * i + 1] = sums[i] / total, sums[half + i] / total
