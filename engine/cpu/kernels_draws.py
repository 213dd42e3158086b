"""Draws in compiled code: a row of logits to its token, without a tensor in between.

`draw` answers UNSURE where the two best scores, or a token and a filter's edge, lie closer than any
rounding could move them, and the caller draws row by row on the host
(`engine.sampling.device_draws`). A token that is told is the one drawn there. `guess`, for drafts,
takes what seems best.

Tokens stand in groups: all whose ids are equal modulo their number, so that neighbours belong to
different groups and one vector instruction serves many of them. The largest logit and the smallest
hash of a group say how well any of its tokens can score; logarithms are taken only where that may
win.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.kernels_filters import DOUBT, REMOVED, cut_of, stays, whole_of
from engine.cpu.kernels_noise import (
    BOTTOM,
    CLOSE,
    INFINITE,
    MOST_SURE,
    REMOVED_BITS,
    SHIFTED,
    TOP,
    bits_of,
    double_of,
    float_of,
    gumbel,
    key_of,
    mixed,
    ordered,
    value,
)
from engine.sampling.plain import NOT_FINITE, UNSURE

_DEPTH = 16  # tokens of a group
_UNSIGNED = np.int32(0x7FFFFFFF)
_TRIES = 64  # tokens beyond an edge that may score best


@fast
def space_for(vocab: Any) -> Any:
    """What a draw needs: of groups the largest logits, the smallest hashes and what their scores
    do not exceed; of one group, its hashes and scores; masses of all tokens."""
    groups = (vocab + _DEPTH - 1) // _DEPTH
    return (
        np.empty(groups, np.float32),
        np.empty(groups, np.int32),
        np.empty(groups, np.float32),
        np.empty(_DEPTH, np.int32),
        np.empty(_DEPTH, np.float32),
        np.empty(vocab, np.float32),
    )


@fast
def _look(row: Any, scale: Any, peaks: Any) -> Any:
    """`peaks`: the largest of each group of the scaled row. The largest without its sign of all,
    but for what is removed, as bits: from those of infinity on, some are no finite numbers."""
    size, groups = np.int32(0), len(peaks)
    peaks[:] = np.float32(-np.inf)
    for first in range(0, len(row), groups):
        part = row[
            first : first + groups
        ]  # an index that is no sum is known to be none from the end
        for g in range(len(part)):
            x = part[g] * scale
            bits = bits_of(x)
            size = max(size, np.int32(bits & _UNSIGNED) if bits != REMOVED_BITS else np.int32(0))
            peaks[g] = x if x > peaks[g] else peaks[g]
    return size


@fast
def _largest(numbers: Any) -> Any:
    most = BOTTOM
    for i in range(len(numbers)):
        most = max(most, ordered(numbers[i]))
    return value(most)


@fast
def _bound(words: Any, low: Any, high: Any, space: Any) -> Any:
    """What no score of a group exceeds. The group that may score best."""
    peaks, hashes, bounds = space[:3]
    groups = len(peaks)
    hashes[:] = TOP
    for first in range(0, len(words), groups):
        part = words[first : first + groups]
        for g in range(len(part)):
            hashes[g] = min(hashes[g], mixed(part[g], low, high))
    for g in range(groups):
        bounds[g] = peaks[g] + gumbel(hashes[g])
    most, group = _largest(bounds), 0
    while bounds[group] != most:
        group += 1
    return group


@fast
def _two_best(
    row: Any, scale: Any, low: Any, high: Any, words: Any, space: Any, start: Any, bar: Any,
    margin: Any,
) -> Any:  # fmt: skip
    """Of the tokens above `bar` the one that scores best and the next, -1 for none, and their
    scores; the next is right if it lies within `margin` of the best."""
    peaks, _, bounds, hashes, scores = space[:5]
    groups = len(peaks)
    best = second = np.float32(-np.inf)
    token = second_best = -1
    for turn in range(-1, groups):
        group = start if turn < 0 else turn
        if bounds[group] < max(second, best - margin) or peaks[group] <= bar or turn == start:
            continue
        count = (len(row) - group + groups - 1) // groups
        for i in range(count):
            hashes[i] = mixed(words[i * groups + group], low, high)
        for i in range(count):
            scores[i] = gumbel(hashes[i])
        for i in range(count):
            x = row[i * groups + group] * scale
            score = x + scores[i]
            if x > bar and score > second:
                second, second_best = score, i * groups + group
                if second > best:
                    best, second, token, second_best = second, best, second_best, token
    return token, second_best, best, second


@fast
def _greedy(row: Any, peaks: Any, most: Any) -> Any:
    """Where the largest stands first, how far it lies above the next, and where that stands."""
    token, second, groups = len(row), np.float32(-np.inf), len(peaks)
    for group in range(groups):
        if peaks[group] == most:
            at = group
            while row[at] != most:
                at += groups
            token = min(token, at)
    mine, second_best = token % groups, -1
    for group in range(groups):
        if group != mine and peaks[group] > second:
            second = peaks[group]
    if second > -np.inf:
        second_best = 0
        while second_best == mine or peaks[second_best] != second:
            second_best += 1
        while row[second_best] != second:
            second_best += groups
    for at in range(mine, len(row), groups):
        if at != token and row[at] > second:
            second, second_best = row[at], at
    return token, min(most - second, MOST_SURE), second_best


@fast
def _sampled(
    row: Any, words: Any, item: Any, key: Any, most: Any, size: Any, space: Any, sure: Any
) -> Any:  # fmt: skip
    """The token, its lead, and the next best, -1 for none. `sure`: UNSURE where it is close, and
    the rest says nothing."""
    scale, low, high = float_of(np.int32(item[4])), np.uint32(key), np.uint32(key >> np.uint64(32))
    fields = item[5], double_of(item[6]), double_of(item[7])
    close = CLOSE + SHIFTED * size
    start = _bound(words, low, high, space)
    bar = np.float32(np.float64(most) + fields[2]) - np.float32(2) * close
    margin = close if sure else np.float32(np.inf)
    cuts = 0 < fields[0] < len(row) or fields[1] < 1
    filtered, whole, known = cuts or fields[2] > -np.inf, 0.0, not cuts
    for _ in range(_TRIES):
        token, second_best, best, second = _two_best(
            row, scale, low, high, words, space, start, bar, margin
        )
        mine, lead = row[token] * scale, min(best - second, MOST_SURE)
        if not known and (mine < most or not sure):
            known = True
            if fields[1] < 1:
                whole = whole_of(row, scale, most, fields[0], space[5])
            bar = max(bar, cut_of(row, scale, most, fields, space[0], space[5], whole))
            if mine <= bar or (second_best >= 0 and row[second_best] * scale <= bar):
                continue
        if filtered:
            state = stays(row, scale, mine, most, close, fields, space[5], whole)
            if state == REMOVED:
                bar = mine
                continue
            if sure and state == DOUBT:
                return UNSURE, lead, second_best
        return UNSURE if sure and best - second <= close else token, lead, second_best
    return UNSURE, np.float32(0), -1


@fast
def _drawn(row: Any, words: Any, item: Any, position: Any, space: Any, sure: Any) -> Any:
    scale = float_of(np.int32(item[4]))
    size = _look(row, scale if scale > 0 else np.float32(1), space[0])
    most = _largest(space[0])
    if size >= INFINITE or most == -np.inf:
        return UNSURE if sure and scale > 0 else NOT_FINITE, np.float32(0), -1
    if scale == 0:
        return _greedy(row, space[0], most)
    return _sampled(row, words, item, key_of(item[3], position), most, float_of(size), space, sure)


@fast
def guess(row: Any, words: Any, item: Any, position: Any, space: Any) -> Any:
    """What a draft draws from its row of logits for a position, NOT_FINITE where nothing can be,
    how far its score lies above the next, MOST_SURE at most, and that next one, -1 for none. `item`
    as of `draw`; `space` of `space_for`."""
    sure = np.bool_(False)  # a literal would have its callees compiled twice
    token, lead, second_best = _drawn(row, words, item, position, space, sure)
    return max(token, NOT_FINITE), lead, second_best


@fast
def draw(logits: Any, items: Any, words: Any, rows: Any) -> None:
    """`rows` int64 `[2, all items' rows]`: tokens, NOT_FINITE or UNSURE instead of some. Where
    they hold a guess before, not a negative number, that is not what is drawn at its parent, they
    keep it, as do those behind it: it is not kept, whatever is drawn there.
    Behind these, the row of its item that each one follows, -1 for the first. `logits` float32
    `[any, vocab]`. `items` int64 `[n, 8]`: first row, how many, position of the first, and
    plain.Plain.words. `words` uint32 `[vocab]`: noise._token_words."""
    tokens, parents = rows[0], rows[1]
    space, sure = space_for(logits.shape[1]), np.bool_(True)
    at, depths = 0, np.zeros(len(tokens), np.int64)  # -1: of what is not drawn
    for i in range(len(items)):
        for j in range(at, at + items[i, 1]):
            if parents[j] >= 0:
                above = at + parents[j]
                kept = depths[above] >= 0 and (tokens[j] < 0 or tokens[j] == tokens[above])
                depths[j] = depths[above] + 1 if kept else -1
            if depths[j] >= 0:
                row, position = logits[items[i, 0] + j - at], items[i, 2] + depths[j]
                tokens[j] = _drawn(row, words, items[i], position, space, sure)[0]
        at += items[i, 1]


@fast
def guess_rows(logits: Any, items: Any, words: Any, tokens: Any, leads: Any) -> None:
    """`guess` of all rows."""
    space = space_for(logits.shape[1])
    at = 0
    for i in range(len(items)):
        for j in range(items[i, 1]):
            row = logits[items[i, 0] + j]
            tokens[at], leads[at], _ = guess(row, words, items[i], items[i, 2] + j, space)
            at += 1
