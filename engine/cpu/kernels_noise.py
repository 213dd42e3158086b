"""Compute the noise of `engine.sampling.noise` in compiled code, equal up to the last bits of its
two logarithms; and map floats to integers of the same order, which also orders NaN and infinities.

The functions do not branch, so that loops over them become vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast

MAX_MARGIN = np.float32(99)  # engine.sampling.plain.MAX_MARGIN
CLOSE = np.float32(1e-4)  # bounds the error of noise, which is below 23 with relative error 1e-6
SHIFTED = np.float32(1e-6)  # bounds several float32 roundings, per unit of the logits
INFINITE, REMOVED_BITS = np.int32(0x7F800000), np.int32(-0x800000)  # bits of +inf and -inf
BOTTOM, TOP = np.int32(-(2**31)), np.int32(2**31 - 1)

# The factors of `engine.sampling.noise.hashed`.
_FIRST, _SECOND, _THIRD = np.uint32(0x7FEB352D), np.uint32(0x846CA68B), np.uint32(0x31848BAB)


@fast
def bits_of(x: Any) -> Any:
    return np.float32(x).view(np.int32)


@fast
def float_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@fast
def double_of(bits: Any) -> Any:
    return np.int64(bits).view(np.float64)


@fast
def _log(x: Any) -> Any:
    """Return the natural logarithm of a positive normal float32: error < 1 ulp (FreeBSD msun)."""
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


@fast
def key_of(seed: Any, position: Any) -> Any:
    """Return the key of a row, as noise.key_halves does."""
    return _splitmix(_splitmix(np.uint64(seed)) ^ np.uint64(position))


@fast
def _splitmix(x: Any) -> Any:
    x = np.uint64(x + np.uint64(0x9E3779B97F4A7C15))
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(x ^ (x >> np.uint64(31)))


@fast
def mixed(word: Any, low: Any, high: Any) -> Any:
    """Return noise.hashed of one token, 0 .. 2**31-1; a smaller hash means larger noise. `word`:
    the token's word (noise.words_of); `low`, `high`: the halves of the row's key."""
    x = np.uint32(np.uint32(word ^ low) * _FIRST)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(19))) ^ high)
    x = np.uint32(x * _SECOND)
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(11))) * _THIRD)
    return np.int32(x ^ np.uint32(np.int32(np.int32(x) >> np.int32(16))))


@fast
def gumbel(word: Any) -> Any:
    """Return noise.gumbel_of one `mixed` word. log1p is computed as the logarithm plus a correction
    for the rounding of its argument."""
    u = np.float32(word) * np.float32(2.0**-31) + np.float32(2.0**-32)
    u = min(u, np.float32(1 - 2**-24))
    rest = np.float32(1) - u
    lost = u - (np.float32(1) - rest)
    return -_log(lost / rest - _log(rest))


@fast
def ordered(x: Any) -> Any:
    """Return an int32 with the order of float32: both zeros map to one number, and NaN lies beyond
    the infinity of its sign."""
    bits = bits_of(x + np.float32(0))
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@fast
def value(order: Any) -> Any:
    """Return the float32 whose `ordered` is `order`."""
    return float_of(np.int32(order ^ np.int32(np.int32(order >> 31) & np.int32(0x7FFFFFFF))))
