"""Keyed Gumbel noise: one number per (seed, absolute position, target vocabulary id).

The noise at a position does not depend on the batch, the row, the draft or earlier draws. So the
same seed gives the same text with any proposer, any K, or none, and a draft that draws with the
same noise agrees with the target as often as this coupling allows (Daliri, Musco and Suresh,
arXiv:2408.07978).

The hash is integer arithmetic modulo 2**32 and 2**64, identical on every device; the two logarithms
after it may differ between devices in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.int32]
Numbers = npt.NDArray[Any]

_MASK64 = 2**64 - 1
_FIRST_FACTOR, _SECOND_FACTOR, _THIRD_FACTOR = 0x7FEB352D, 0x846CA68B, 0x31848BAB
_LARGEST_UNIFORM = 1 - 2**-24  # the float32 below 1: keeps -log(1 - u) finite


def noise_numbers(scales: Numbers, seeds: Seq[int], positions: Numbers) -> list[Numbers]:
    """Return what `with_noise` needs of each row, to be sent to its device: factors of scores and
    of noise, float64 `[2, rows]`, and keys; nothing if all `scales` (0: greedy) are 0."""
    if not scales.any():
        return []
    keys = key_halves(splitmix64(np.array(seeds, np.uint64)), positions)
    return [np.array([np.where(scales, scales, 1.0), scales > 0]), keys.view(np.int64)]


def with_noise(scores: Tensor, words: Tensor, factors: Tensor, keys: Tensor) -> Tensor:
    """Return `scores` `[rows, n]`, scaled, with each row's Gumbel noise for the tokens of these
    `words`, `[n]` or `[rows, n]`. `factors`, `keys`: the `noise_numbers` of the rows."""
    scales, shares = factors.float()[:, :, None]
    noise = gumbel_of(hashed(words, *keys.view(torch.int32).T[:, :, None]))
    return torch.addcmul(scores * scales, noise, shares)


def gumbel_of(words: Tensor) -> Tensor:
    """Return float32 -log(-log(1 - u)), u = (word + 0.5) / 2**31, of int32 words in 0 .. 2**31-1.

    u is exact near 0, where the large values come from (about -log u there). Near 1, which gives
    the small values, u may round to 1 in float32 and is clamped below it.
    """
    u = words.to(torch.float32).mul_(2.0**-31).add_(2.0**-32)
    exponential = u.clamp_(max=_LARGEST_UNIFORM).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def hashed(token_words: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return int32 `[rows, vocab]`, uniform on 0 .. 2**31-1, from the halves of the rows' keys,
    int32 `[rows, 1]` on the same device.

    Three multiply-and-fold rounds (the factors of Wellons' lowbias32, then one of his triple32)
    over a token word that is already mixed, with one half of the row's 64-bit key added before the
    first and the second round. Multiplication spreads a difference upwards only, so words that
    differ only in high bits need the third round. The shifts of 19 and 11 make such pairs as
    independent as others. An arithmetic right shift copies the sign bit: the first folds mask the
    copies off; in the last one they cancel the sign, which maps two words onto each of the 2**31
    results: still uniform.
    """
    x = token_words.bitwise_xor(low)
    x.mul_(_FIRST_FACTOR)
    x.bitwise_xor_((x >> 19).bitwise_and_(0x1FFF))
    x.bitwise_xor_(high)
    x.mul_(_SECOND_FACTOR - 2**32)
    x.bitwise_xor_((x >> 11).bitwise_and_(0x1FFFFF))
    x.mul_(_THIRD_FACTOR)
    return x.bitwise_xor_(x >> 16)


def key_halves(seeds: Words, positions: Numbers) -> Halves:
    """Return the halves (low, high) of the rows' keys, int32 `[rows, 2]`, of hashed `seeds`."""
    keys: Words = splitmix64(seeds ^ positions.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def splitmix64(x: Any) -> Any:
    """Return the SplitMix64 hash (Steele, Lea and Flood, 2014) of an int, or of each element of a
    uint64 array."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def words_of(vocab_size: int) -> npt.NDArray[np.uint32]:
    """Return `token_words_of` a vocabulary as an array, for compiled code."""
    return token_words_of(vocab_size).numpy().view(np.uint32)


@lru_cache(maxsize=8)
def token_words_of(vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return int32 `[vocab]`, the words that `hashed` mixes with the keys: fixed, mixed and
    distinct (lowbias32, a bijection). Read-only."""
    x = (torch.arange(vocab_size, dtype=torch.int64) * 0x9E3779B1 + 0x85EBCA77) & 0xFFFFFFFF
    for shift, factor in ((16, _FIRST_FACTOR), (15, _SECOND_FACTOR)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32).to(device)
