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

Key = tuple[int, int]  # (seed of 64 bits, absolute position)
Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.int32]

_MASK64 = 2**64 - 1
_FIRST_FACTOR, _SECOND_FACTOR, _THIRD_FACTOR = 0x7FEB352D, 0x846CA68B, 0x31848BAB
# Constants of SplitMix64 (Steele, Lea and Flood, 2014), as numpy scalars, which wrap around.
_START, _LAST_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_ROUNDS = [
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
]
_LARGEST_UNIFORM = 1 - 2**-24  # the float32 below 1: keeps -log(1 - u) finite


def gumbel(keys: Seq[Key | None], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 `[len(keys), vocab]` Gumbel noise, between -2.9 and 22.2; zeros for None."""
    return _gumbel(keys, token_words_of(vocab_size, device))


def gumbel_at(keys: Seq[Key | None], ids: Tensor, vocab_size: int) -> Tensor:
    """`gumbel` for the `ids` int64 `[len(keys), any]` only."""
    return _gumbel(keys, token_words_of(vocab_size, ids.device)[ids])


def _gumbel(keys: Seq[Key | None], words: Tensor) -> Tensor:
    halves = (torch.from_numpy(half.view(np.int32)) for half in key_columns(keys))
    low, high = (half.to(words.device, non_blocking=True) for half in halves)
    noise = gumbel_of(hashed(words, low, high))
    if None not in keys:
        return noise
    drawn = torch.tensor([key is not None for key in keys]).to(words.device, non_blocking=True)
    return noise.where(drawn[:, None], 0.0)


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


def key_columns(
    keys: Seq[Key | None],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the low and the high halves of the rows' keys, `[n, 1]` each; arbitrary for None."""
    row_words = np.array([row_key(*(key or (0, 0))) for key in keys], dtype=np.uint64)[:, None]
    return row_words.astype(np.uint32), (row_words >> np.uint64(32)).astype(np.uint32)


def key_halves(seeds: Words, positions: npt.NDArray[Any]) -> Halves:
    """Return the halves (low, high) of the rows' keys, int32 `[rows, 2]`, of hashed `seeds`."""
    words = seeds ^ positions.astype(np.uint64)
    words += _START
    for shift, factor in _ROUNDS:  # splitmix64, in place
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words.view(np.int32).reshape(-1, 2)


def row_key(seed: int, position: int) -> int:
    """Return a row's 64-bit key: SplitMix64 (Steele, Lea and Flood, 2014) of seed and position."""
    key: int = splitmix64(splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return key


def splitmix64(x: Any) -> Any:
    """Return the SplitMix64 hash of an int, or of each element of a uint64 array."""
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
