"""Sample tokens from rows of logits in compiled code, without intermediate tensors.

`draw` returns UNDECIDED where rounding could change the result: the two best scores, or a token and
a filter's threshold, are too close. The caller then draws that row on the host
(`engine.sampling.device_draws`). Every token that `draw` does return equals the host's draw.
`draw_draft`, for drafts, returns the apparent best token instead of UNDECIDED.

Tokens are grouped by id modulo the number of groups, so neighbouring tokens belong to different
groups and one vector instruction handles many groups. A group's largest logit and smallest hash
bound the score of all its tokens. Logarithms are computed only for groups that may win.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast, fast_in_place
from engine.cpu.kernels_filters import REMOVED, UNCERTAIN, cut_of, stays, whole_of
from engine.cpu.kernels_noise import (
    BOTTOM,
    CLOSE,
    INFINITE,
    MAX_MARGIN,
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
from engine.sampling.plain import NOT_FINITE, UNDECIDED

_DEPTH = 16  # tokens of a group
_UNSIGNED = np.int32(0x7FFFFFFF)
_TRIES = 64  # best-scoring tokens that filters may remove before the draw gives up


@fast
def space_for(vocab: Any) -> Any:
    """Return a draw's scratch arrays: per group the largest logit, smallest hash and score bound;
    for one group its hashes and scores; per token its probability mass."""
    groups = (vocab + _DEPTH - 1) // _DEPTH
    return (
        np.empty(groups, np.float32), np.empty(groups, np.int32), np.empty(groups, np.float32),
        np.empty(_DEPTH, np.int32), np.empty(_DEPTH, np.float32), np.empty(vocab, np.float32),
    )  # fmt: skip


@fast_in_place
def _group_maxima(row: Any, scale: Any, peaks: Any) -> Any:
    """Write each group's largest scaled logit to `peaks`. Return the bits of the row's largest
    absolute value, ignoring removed (-inf) tokens; >= INFINITE means some are not finite."""
    size, groups = np.int32(0), len(peaks)
    peaks[:] = np.float32(-np.inf)
    for first in range(0, len(row), groups):
        part = row[
            first : first + groups
        ]  # sliced so that no index is a sum, which numba would check for being negative
        for g in range(len(part)):
            x = part[g] * scale
            bits = bits_of(x)
            size = max(size, np.int32(bits & _UNSIGNED) if bits != REMOVED_BITS else np.int32(0))
            peaks[g] = x if x > peaks[g] else peaks[g]
    return size


@fast_in_place
def _largest(numbers: Any) -> Any:
    most = BOTTOM
    for i in range(len(numbers)):
        most = max(most, ordered(numbers[i]))
    return value(most)


@fast_in_place
def _bound(words: Any, low: Any, high: Any, space: Any) -> Any:
    """Write each group's upper bound of its scores; return the group with the largest bound."""
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


@fast_in_place
def _two_best(
    row: Any, scale: Any, low: Any, high: Any, words: Any, space: Any, start: Any, bar: Any,
    margin: Any,
) -> Any:  # fmt: skip
    """Return the best and second-best scoring tokens above `bar` (-1: none) and their scores. The
    second is exact only if its score is within `margin` of the best."""
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


@fast_in_place
def _greedy(row: Any, peaks: Any, most: Any) -> Any:
    """Return the first index of the largest logit, its margin, and the next one's (-1: none)."""
    token, second, groups = len(row), np.float32(-np.inf), len(peaks)
    for group in range(groups):
        if peaks[group] == most:
            at = group
            while row[at] != most:
                at += groups
            token = min(token, at)
    token_group, second_best = token % groups, len(row)
    for group in range(groups):
        if group != token_group and peaks[group] > second:
            second = peaks[group]
    for at in range(token_group, len(row), groups):
        if at != token:
            second = max(second, row[at])
    for group in range(groups):
        if peaks[group] >= second > -np.inf:
            for at in range(group, second_best, groups):
                if row[at] == second and at != token:
                    second_best = min(second_best, at)
    return token, min(most - second, MAX_MARGIN), second_best if second > -np.inf else -1


@fast_in_place
def _sampled(
    row: Any, words: Any, item: Any, key: Any, most: Any, size: Any, space: Any, sure: Any
) -> Any:  # fmt: skip
    """Return the token, its margin, and the second-best token (-1: none). With `sure`, the token is
    UNDECIDED where the draw is too close; the other two values are then meaningless."""
    scale, low, high = float_of(np.int32(item[4])), np.uint32(key), np.uint32(key >> np.uint64(32))
    fields = item[5], double_of(item[6]), double_of(item[7])
    close = CLOSE + SHIFTED * size
    start = _bound(words, low, high, space)
    bar = np.float32(np.float64(most) + fields[2]) - np.float32(2) * close
    within = close if sure else np.float32(np.inf)
    cuts = 0 < fields[0] < len(row) or fields[1] < 1
    filtered, whole, known = cuts or fields[2] > -np.inf, 0.0, not cuts
    for _ in range(_TRIES):
        token, second_best, best, second = _two_best(
            row, scale, low, high, words, space, start, bar, within
        )
        logit, margin = row[token] * scale, min(best - second, MAX_MARGIN)
        if not known and (logit < most or not sure):
            known = True
            if fields[1] < 1:
                whole = whole_of(row, scale, most, fields[0], space[5])
            bar = max(bar, cut_of(row, scale, most, fields, space[0], space[5], whole))
            if logit <= bar or (second_best >= 0 and row[second_best] * scale <= bar):
                continue
        if filtered:
            state = stays(row, scale, logit, most, close, fields, space[5], whole)
            if state == REMOVED:
                bar = logit
                continue
            if sure and state == UNCERTAIN:
                return UNDECIDED, margin, second_best
        return UNDECIDED if sure and best - second <= close else token, margin, second_best
    return UNDECIDED, np.float32(0), -1


@fast_in_place
def _drawn(row: Any, words: Any, item: Any, position: Any, space: Any, sure: Any) -> Any:
    scale = float_of(np.int32(item[4]))
    size = _group_maxima(row, scale if scale > 0 else np.float32(1), space[0])
    most = _largest(space[0])
    if size >= INFINITE or most == -np.inf:
        return UNDECIDED if sure and scale > 0 else NOT_FINITE, np.float32(0), -1
    if scale == 0:
        return _greedy(row, space[0], most)
    return _sampled(row, words, item, key_of(item[3], position), most, float_of(size), space, sure)


@fast_in_place
def draw_draft(row: Any, words: Any, item: Any, position: Any, space: Any) -> Any:
    """Return a draft's token at `position` from its row of logits (NOT_FINITE if none can be
    drawn), its margin over the second best (at most MAX_MARGIN), and that second best (-1: none).
    `item`: see `draw`; `space`: from `space_for`."""
    sure = np.bool_(False)  # with a literal, numba would compile the callees twice
    token, margin, second_best = _drawn(row, words, item, position, space, sure)
    return max(token, NOT_FINITE), margin, second_best


@fast
def draw(logits: Any, items: Any, words: Any, rows: Any) -> None:
    """Draw the tokens of all items into `rows` int64 `[2, all items' rows]`: `rows[0]` receives
    tokens, NOT_FINITE or UNDECIDED; `rows[1]` has each row's parent within its item, -1 for the
    first. On entry `rows[0]` holds each row's draft token, or a negative number for none. A draft
    token that differs from the draw at its parent is rejected: its row and its descendants are not
    drawn and keep their values. `logits` float32 `[any, vocab]`. `items` int64 `[n, 8]`: first row,
    row count, first position, plain.Plain.words. `words` uint32 `[vocab]`: noise.words_of."""
    tokens, parents = rows[0], rows[1]
    space, sure = space_for(logits.shape[1]), np.bool_(True)
    at, depths = 0, np.zeros(len(tokens), np.int64)  # depth -1: not drawn
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
def draw_draft_rows(logits: Any, items: Any, words: Any, tokens: Any, margins: Any) -> None:
    """Apply `draw_draft` to all rows. `tokens` `[2, rows]`: the best and the second best."""
    space = space_for(logits.shape[1])
    at = 0
    for i in range(len(items)):
        for j in range(items[i, 1]):
            row, own = logits[items[i, 0] + j], items[i]
            drawn = draw_draft(row, words, own, own[2] + j, space)
            tokens[0, at], margins[at], tokens[1, at] = drawn
            at += 1
