"""Draws in compiled code: a row of logits to its token, without a tensor in between.

The noise here is that of `engine.sampling.noise` up to the last bits of its two logarithms. So
`draw` answers UNSURE where the two best scores lie closer than any rounding could move them, and
the caller asks the long way. A token that is told is the long way's token.

No loop branches inside, so that each becomes vector instructions; scores are compared as integers
in the order of floats, which see NaN and infinities as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

NOT_FINITE, UNSURE = -1, -2  # in place of a token
MOST_SURE = np.float32(99)  # as sampler's
CLOSE = np.float32(1e-4)  # more than noise can differ: it is below 23, its relative error 1e-6
SHIFTED = np.float32(1e-6)  # per unit of the logits: several roundings in float32

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)  # as in noise
_BLOCK = 64  # tokens of a row that are looked at, or passed over, together
_MOST_NOISE = np.float32(22.3)
_INFINITE, _MINUS_INFINITE = np.int32(0x7F800000), np.int32(-2139095041)  # as _ordered
_BOTTOM = np.int32(-(2**31))


def exactly(function: Callable[..., Any], *more: str) -> Any:
    """Compiled at the first call, each operation rounded as written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(more)}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for the cache
        return numba.njit(**options)(function)


def summing(function: Callable[..., Any]) -> Any:
    """Sums in any order."""
    return exactly(function, "reassoc")


def _cast(source: Any, target: Any, kind: Any) -> Any:
    @intrinsic  # type: ignore[misc]
    def cast(typing: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], kind)

        return target(source), generate

    return cast


bits_of = _cast(types.float32, types.int32, ir.IntType(32))
float_of = _cast(types.int32, types.float32, ir.FloatType())


@exactly
def _log(x: Any) -> Any:
    """Natural logarithm of a positive normal float32, as in FreeBSD's msun: below 1 ulp."""
    shifted = np.int32(bits_of(x) + np.int32(0x3F800000 - 0x3F3504F3))
    power = np.float32(np.int32(shifted >> 23) - np.int32(127))
    f = float_of(np.int32((shifted & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3))) - np.float32(1)
    s = f / (np.float32(2) + f)
    z = s * s
    w = z * z
    odd = w * (np.float32(0.40000972152) + w * np.float32(0.24279078841))
    even = z * (np.float32(0.66666662693) + w * np.float32(0.28498786688))
    half = np.float32(0.5) * f * f
    low = s * (half + (even + odd)) + power * np.float32(9.0580006145e-06)
    return low - half + f + power * np.float32(6.9313812256e-01)


@exactly
def _key(seed: Any, position: Any) -> Any:
    """noise.row_key."""
    return _splitmix(_splitmix(np.uint64(seed)) ^ np.uint64(position))


@exactly
def _splitmix(x: Any) -> Any:
    x = np.uint64(x + np.uint64(0x9E3779B97F4A7C15))
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(x ^ (x >> np.uint64(31)))


@exactly
def _mixed(word: Any, low: Any, high: Any) -> Any:
    """noise._hash of one token: 0 .. 2**31-1, and the smaller, the larger the noise."""
    x = np.uint32(np.uint32(word ^ low) * _FIRST)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) ^ high)
    x = np.uint32(x * _SECOND)
    return np.int32(x ^ np.uint32(np.int32(np.int32(x) >> np.int32(16))))


@exactly
def _gumbel(mixed: Any) -> Any:
    """noise.gumbel_of one word. log1p is the logarithm and what rounding its argument lost."""
    u = np.float32(mixed) * np.float32(2.0**-31) + np.float32(2.0**-32)
    u = min(u, np.float32(1 - 2**-24))
    rest = np.float32(1) - u
    lost = u - (np.float32(1) - rest)
    return -_log(lost / rest - _log(rest))


@exactly
def _noise(key: Any, words: Any, out: Any) -> None:
    """`out` `[vocab]`: the noise of one row; `words` uint32, see noise._token_words."""
    low, high = np.uint32(key), np.uint32(key >> np.uint64(32))
    for v in range(len(out)):
        out[v] = _gumbel(_mixed(words[v], low, high))


@exactly
def noise_rows(items: Any, words: Any, out: Any) -> None:
    """`out` `[any, vocab]`; `items` as of `draw`."""
    for i in range(len(items)):
        for j in range(items[i, 1]):
            _noise(_key(items[i, 3], items[i, 2] + j), words, out[items[i, 0] + j])


@exactly
def _ordered(x: Any) -> Any:
    """int32 in the order of floats, zeros being one number: NaN lies beyond the infinities, on
    either side."""
    bits = bits_of(x + np.float32(0))
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@exactly
def _place(row: Any, value: Any) -> Any:
    """The first place of `value`, which is there."""
    v = 0
    while row[v] != value:
        v += 1
    return v


@exactly
def _extremes(row: Any) -> Any:
    """The smallest and the largest, as `_ordered`."""
    least, most = np.int32(2**31 - 1), _BOTTOM
    for v in range(len(row)):
        o = _ordered(row[v])
        least, most = min(least, o), max(most, o)
    return least, most


@exactly
def _value(ordered: Any) -> Any:
    return float_of(np.int32(ordered ^ np.int32(np.int32(ordered >> 31) & np.int32(0x7FFFFFFF))))


@exactly
def _second(row: Any, token: Any) -> Any:
    """The largest but for the one at `token`; -inf if there is none."""
    most = max(_extremes(row[:token])[1], _extremes(row[token + 1 :])[1])
    return _value(max(most, _MINUS_INFINITE))


@exactly
def _greedy(row: Any) -> Any:
    least, most = _extremes(row)
    if most >= _INFINITE or most == _MINUS_INFINITE or least < _MINUS_INFINITE:
        return NOT_FINITE
    return _place(row, _value(most))


@exactly
def _mix(words: Any, low: Any, high: Any, mixed: Any) -> Any:
    """`_mixed` of these, and the smallest."""
    least = np.int32(2**31 - 1)
    for i in range(len(words)):
        mixed[i] = _mixed(words[i], low, high)
        least = min(least, mixed[i])
    return least


@exactly
def _score(scaled: Any, mixed: Any, scores: Any) -> Any:
    """The largest of them, as `_ordered`."""
    most = _BOTTOM
    for i in range(len(scaled)):
        scores[i] = scaled[i] + _gumbel(mixed[i])
        most = max(most, _ordered(scores[i]))
    return most


@exactly
def _plain(scaled: Any, most: Any, close: Any, key: Any, words: Any, peaks: Any) -> Any:
    """The token of a row without filters. Where a block's likeliest token would not win with the
    block's largest noise, nothing of it is computed."""
    low, high = np.uint32(key), np.uint32(key >> np.uint64(32))
    top = token = _place(scaled, most)
    best = scaled[token] + _gumbel(_mixed(words[token], low, high))
    second = np.float32(-np.inf)
    mixed, scores = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    for block in range(len(peaks)):
        first, stop = block * _BLOCK, min((block + 1) * _BLOCK, len(scaled))
        if peaks[block] + _MOST_NOISE < best - close:
            continue
        least = _mix(words[first:stop], low, high, mixed)
        if peaks[block] + _gumbel(least) < best - close:
            continue
        if _value(_score(scaled[first:stop], mixed, scores)) < best - close:
            continue
        for i in range(stop - first):
            if first + i != top and scores[i] > second:
                second = scores[i]
                if second > best:
                    best, second, token = second, best, first + i
    return token if best - second > close else UNSURE


@exactly
def _draw(row: Any, scale: Any, key: Any, words: Any, scaled: Any, peaks: Any) -> Any:
    for v in range(len(row)):
        scaled[v] = row[v] * scale
    least, most = _extremes(scaled)
    if most >= _INFINITE or least <= _MINUS_INFINITE:
        return UNSURE
    highest = _value(most)
    close = CLOSE + SHIFTED * max(abs(highest), abs(_value(least)))
    for block in range(len(peaks)):
        peaks[block] = _value(_extremes(scaled[block * _BLOCK : (block + 1) * _BLOCK])[1])
    return _plain(scaled, highest, close, key, words, peaks)


@exactly
def draw(logits: Any, items: Any, words: Any, tokens: Any) -> None:
    """`tokens` int64, of row after row of all items; NOT_FINITE or UNSURE instead of some.

    `logits` float32 `[any, vocab]`. `items` int64 `[n, 5]`: first row, how many, position of the
    first, and the bits of the seed and of the float32 that multiplies the logits (0: greedy).
    `words` uint32 `[vocab]`: noise._token_words."""
    vocab = logits.shape[1]
    scaled = np.empty(vocab, np.float32)
    peaks = np.empty((vocab + _BLOCK - 1) // _BLOCK, np.float32)
    at = 0
    for i in range(len(items)):
        scale = float_of(np.int32(items[i, 4]))
        for j in range(items[i, 1]):
            row = logits[items[i, 0] + j]
            if scale == 0:
                tokens[at] = _greedy(row)
            else:
                key = _key(items[i, 3], items[i, 2] + j)
                tokens[at] = _draw(row, scale, key, words, scaled, peaks)
            at += 1


@exactly
def prepare(
    logits: Any, items: Any, words: Any, scaled: Any, scores: Any, ends: Any
) -> None:  # fmt: skip
    """What filters need, row after row of all items: scaled logits and, with the noise, scores
    `[rows, vocab]`; of the former the largest and the smallest `[rows, 2]`, NaN where any is not
    finite."""
    at = 0
    for i in range(len(items)):
        scale = float_of(np.int32(items[i, 4]))
        for j in range(items[i, 1]):
            row = logits[items[i, 0] + j]
            _noise(_key(items[i, 3], items[i, 2] + j), words, scores[at])
            for v in range(len(row)):
                scaled[at, v] = row[v] * scale
                scores[at, v] += scaled[at, v]
            least, most = _extremes(scaled[at])
            ends[at] = np.float32(np.nan)
            if most < _INFINITE and least > _MINUS_INFINITE:
                ends[at, 0], ends[at, 1] = _value(most), _value(least)
            at += 1


@exactly
def judge(logits: Any, items: Any, words: Any, tokens: Any, leads: Any) -> None:
    """As `draw` without doubts; and how far each token's score lies above the next, `MOST_SURE` at
    most, 0 where there is nothing to compare."""
    scores = np.empty(logits.shape[1], np.float32)
    at = 0
    for i in range(len(items)):
        scale = float_of(np.int32(items[i, 4]))
        for j in range(items[i, 1]):
            row = logits[items[i, 0] + j]
            scores[:] = row
            if scale > 0:
                _noise(_key(items[i, 3], items[i, 2] + j), words, scores)
                for v in range(len(row)):
                    scores[v] += row[v] * scale
            tokens[at] = _greedy(scores)
            leads[at] = np.float32(0)
            if tokens[at] >= 0:
                leads[at] = min(scores[tokens[at]] - _second(scores, tokens[at]), MOST_SURE)
            at += 1
