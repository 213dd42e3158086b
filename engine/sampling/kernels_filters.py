"""Draws under top_k, top_p and min_p in compiled code. As `engine.sampling.kernels`: what is close
to call, at an edge of a filter too, is left to the long way (`engine.sampling.filters`).

A filter keeps what stands before an edge in the order of likelihood. So nothing is sorted: the
token with the best score stays if few enough tokens, and little enough mass, lie above it;
otherwise neither it nor what lies below it does, and the next best is asked.

Nothing here calls compiled code of another file: numba's cache looks at one file's date only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.sampling.kernels import CLOSE, SHIFTED, UNSURE, exactly, float_of, summing

MOST_RANKED = 128  # of top_k; more go the long way

_EDGE = 2e-5  # of all mass: more than sums in float32 can differ
_TRIES = 64  # tokens beyond an edge that may score best
_BLOCK = 64  # summed in float32


@exactly
def _exp(x: Any) -> Any:
    """Of float32 from -87 to 0, about 1 ulp; 0 below."""
    whole = np.floor(x * np.float32(1.44269504089) + np.float32(0.5))
    r = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = np.int32(max(whole, np.float32(-127)))
    return p * float_of(np.int32(np.int32(power + np.int32(127)) << 23))


@summing
def _mass_above(scaled: Any, bar: Any, mass: Any) -> Any:
    """The sum of `mass` where the row lies above `bar`; blocks in float32, their sum in float64."""
    total = 0.0
    for first in range(0, len(scaled), _BLOCK):
        part = np.float32(0)
        for v in range(first, min(first + _BLOCK, len(scaled))):
            part += mass[v] if scaled[v] > bar else np.float32(0)
        total += np.float64(part)
    return total


@exactly
def _two_best(scores: Any) -> Any:
    """Where the largest stands, and the second largest."""
    token, best, second = 0, scores[0], np.float32(-np.inf)
    for v in range(1, len(scores)):
        if scores[v] > second:
            second = scores[v]
            if second > best:
                token, best, second = v, second, best
    return token, second


@exactly
def _largest(scaled: Any, found: Any) -> None:
    """`found`: as many of the largest of the row, largest first."""
    found[:] = np.float32(-np.inf)
    last = len(found) - 1
    for v in range(len(scaled)):
        x = scaled[v]
        if x > found[last]:
            i = last
            while i > 0 and found[i - 1] < x:
                found[i] = found[i - 1]
                i -= 1
            found[i] = x


@exactly
def _count_equal(scaled: Any, value: Any) -> Any:
    count = 0
    for v in range(len(scaled)):
        count += scaled[v] == value
    return count


@exactly
def _draw(scaled: Any, scores: Any, ends: Any, fields: Any, mass: Any) -> Any:
    """`scores` are written over."""
    most, least = ends
    if not np.isfinite(most):
        return UNSURE
    for v in range(len(scaled)):
        mass[v] = _exp(scaled[v] - most)
    close = CLOSE + SHIFTED * max(abs(most), abs(least))
    top_k = int(fields[0]) if fields[0] < len(scaled) else 0
    top_p, floor = fields[1], most + fields[2]
    bar, whole = np.float32(-np.inf), 0.0
    if top_k > 0:
        ranked = np.empty(top_k, np.float32)
        _largest(scaled, ranked)
        bar = ranked[top_k - 1]
        for i in range(top_k):
            whole += np.float64(_exp(ranked[i] - most))
    elif top_p < 1:
        whole = _mass_above(scaled, bar, mass)
    edge = (_EDGE + 1e-6 * abs(np.float64(most))) * whole
    for _ in range(_TRIES):
        token, second = _two_best(scores)
        mine = scaled[token]
        if _count_equal(scaled, mine) > 1 or (mine < most and abs(mine - floor) <= close):
            return UNSURE
        stays = mine == most or (mine >= bar and mine >= floor)
        if stays and top_p < 1 and mine < most:
            above = _mass_above(scaled, mine, mass) - top_p * whole
            if abs(above) <= edge:
                return UNSURE
            stays = above < 0
        if stays:
            return token if scores[token] - second > close else UNSURE
        for v in range(len(scaled)):
            scores[v] = scores[v] if scaled[v] > mine else np.float32(-np.inf)
    return UNSURE


@exactly
def draw_filtered(
    scaled: Any, scores: Any, ends: Any, counts: Any, fields: Any, tokens: Any
) -> None:  # fmt: skip
    """`tokens` int64 of these rows, of kernels.prepare; UNSURE instead of some. `counts` `[n]` rows
    have `fields` float64 `[n, 3]`: top_k (0 is off), top_p, and the logarithm of min_p."""
    mass = np.empty(scaled.shape[1], np.float32)
    at = 0
    for i in range(len(counts)):
        for _ in range(counts[i]):
            tokens[at] = _draw(scaled[at], scores[at], ends[at], fields[i], mass)
            at += 1
