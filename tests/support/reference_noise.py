"""The keyed Gumbel noise, reimplemented from its definition in plain integers and float64.

A row's 64-bit key is SplitMix64(SplitMix64(seed) xor position). A token's 32-bit word is
lowbias32(id * 0x9E3779B1 + 0x85EBCA77). Three multiply-and-fold rounds join the two halves of the
key with the word; 31 bits of the result are the uniform u, and the noise is -log(-log(1 - u)).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

M32, M64 = 2**32 - 1, 2**64 - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


@cache
def token_word(token: int) -> int:
    x = (token * 0x9E3779B1 + 0x85EBCA77) & M32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


def uniform(seed: int, position: int, token: int) -> float:
    key = splitmix64(splitmix64(seed) ^ position)
    x = ((token_word(token) ^ (key & M32)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 19)) ^ (key >> 32)) * 0x846CA68B & M32
    x = ((x ^ (x >> 11)) * 0x31848BAB) & M32
    # The last fold copies the sign into the upper half, then the sign itself is dropped.
    x = (x ^ (x >> 16) ^ (0xFFFF0000 if x >> 31 else 0)) & 0x7FFFFFFF
    return x * 2.0**-31 + 2.0**-32


def gumbel(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    u = np.array([uniform(seed, position, token) for token in range(vocab_size)])
    return np.asarray(-np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24))))
