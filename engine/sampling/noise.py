"""Keyed Gumbel noise: one number per (seed, absolute position, target vocabulary id), nothing else.

The noise at a position does not depend on the batch, the row, the drafter or what was drawn before,
so the same seed gives the same text with any proposer, any K, or none, and a drafter that draws
with the same noise agrees with the target as often as coupling allows (Daliri, Musco and Suresh,
arXiv:2408.07978).

The hash is integer arithmetic modulo 2**32 and 2**64, identical on every device; the two logarithms
after it may differ between devices in the last bit. The cache only saves work: a row is the same
whether it was cached or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Key = tuple[int, int]  # (seed of 64 bits, absolute position)

_CACHE_ROWS = 512
_CACHE_BYTES = 64 * 2**20
_SILENT = 0  # slot of the row without noise
_MASK64 = 2**64 - 1
_FIRST_FACTOR, _SECOND_FACTOR, _THIRD_FACTOR = 0x7FEB352D, 0x846CA68B, 0x31848BAB
_LARGEST_UNIFORM = 1 - 2**-24  # the float32 below 1: keeps -log(1 - u) finite


class KeyedNoise:
    """Rows of standard Gumbel noise over `vocab_size` target ids, float32 on `device`.

    The draft and the target of one step ask for the same rows, and positions after a rejection are
    asked for again in the next step, so the last `cache_rows` rows are kept, if they fit 64 MiB.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        device: torch.device | str = "cpu",
        cache_rows: int = _CACHE_ROWS,
    ) -> None:
        self._device = torch.device(device)
        self._token_words = token_words_of(vocab_size).to(self._device)
        self._capacity = max(min(cache_rows, _CACHE_BYTES // (4 * vocab_size)), 1)
        self._rows = torch.empty(1 + self._capacity, vocab_size, device=self._device)
        self._rows[_SILENT] = 0
        self._slots: dict[Key, int] = {}
        self._held: list[Key | None] = [None] * (1 + self._capacity)
        self._next = 1

    def rows(self, keys: Seq[Key | None]) -> Tensor:
        """[len(keys), vocab] noise; None asks for a row of zeros (greedy). Read-only, and valid
        until the next call: it may be a view of the cache."""
        if not self._hold(keys):
            return self._direct(keys)
        slots = [_SILENT if key is None else self._slots[key] for key in keys]
        first = slots[0] if slots else 0
        if slots == list(range(first, first + len(slots))):
            return self._rows[first : first + len(slots)]
        index = torch.tensor(slots).to(self._device, non_blocking=True)
        return self._rows.index_select(0, index)

    def prefetch(self, keys: Seq[Key]) -> None:
        """Compute in one go the rows that will be asked for soon. Changes no result."""
        self._hold(keys)

    def _hold(self, keys: Iterable[Key | None]) -> bool:
        """Bring every key into the cache; False when there are more of them than slots."""
        wanted = dict.fromkeys(key for key in keys if key is not None)
        missing = [key for key in wanted if key not in self._slots]
        if not missing:
            return True
        if len(wanted) > self._capacity:
            return False
        if self._next + len(missing) > len(self._held):
            self._next = 1
        if any(key in wanted for key in self._held[self._next : self._next + len(missing)]):
            self._clear()
            missing = list(wanted)
        self._store(missing)
        return True

    def _store(self, keys: list[Key]) -> None:
        first = self._next
        self._next = stop = first + len(keys)
        for old in self._held[first:stop]:
            if old is not None:
                del self._slots[old]
        self._held[first:stop] = keys
        self._slots.update(zip(keys, range(first, stop), strict=True))
        self._rows[first:stop] = gumbel(keys, self._token_words)

    def _clear(self) -> None:
        self._slots.clear()
        self._held = [None] * len(self._held)
        self._next = 1

    def _direct(self, keys: Seq[Key | None]) -> Tensor:
        """Without the cache, for a step with more rows than it holds."""
        rows = gumbel([key or (0, 0) for key in keys], self._token_words)
        silent = [i for i, key in enumerate(keys) if key is None]
        if silent:
            rows.index_fill_(0, torch.tensor(silent).to(rows.device, non_blocking=True), 0)
        return rows


def gumbel(keys: Seq[Key], token_words: Tensor) -> Tensor:
    """[len(keys), vocab] float32 standard Gumbel noise, between -2.9 and 22.2."""
    if token_words.device.type == "cpu":
        return gumbel_on_host(_hash_on_host(keys, token_words.numpy().view(np.uint32)))
    return gumbel_of(_hash(keys, token_words))


def gumbel_of(words: Tensor) -> Tensor:
    """int32 words in 0 .. 2**31-1 -> float32 -log(-log(1 - u)), u = (word + 0.5) / 2**31.

    u is exact near 0, where the large values come from (about -log u there). The other end only
    decides how small a small value is: rounded to float32 it may be 1, and is clamped below that.
    """
    u = words.to(torch.float32).mul_(2.0**-31).add_(2.0**-32)
    exponential = u.clamp_(max=_LARGEST_UNIFORM).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def gumbel_on_host(words: npt.NDArray[np.uint32]) -> Tensor:
    """`gumbel_of` in numpy, which takes half of the time on the CPU (a third for one row). log1p is
    torch's, because numpy has no fast one on every CPU."""
    u = words.view(np.int32).astype(np.float32)
    u *= np.float32(2.0**-31)
    u += np.float32(2.0**-32)
    np.minimum(u, np.float32(_LARGEST_UNIFORM), out=u)
    np.negative(u, out=u)
    noise = torch.from_numpy(u)
    noise.log1p_()
    np.negative(u, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    return noise


def _hash(keys: Seq[Key], token_words: Tensor) -> Tensor:
    """[len(keys), vocab] int32, uniform on 0 .. 2**31-1."""
    halves = (torch.from_numpy(half.view(np.int32)) for half in key_columns(keys))
    there = (half.to(token_words.device, non_blocking=True) for half in halves)
    return hashed(token_words, *there)


def hashed(token_words: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[rows, vocab] int32, uniform on 0 .. 2**31-1, from the halves of the rows' keys, [rows, 1]
    int32 on the same device.

    Three multiply-and-fold rounds (the factors of Wellons' lowbias32, then one of his triple32)
    over a token word that is mixed already, with half of the row's 64-bit key before the first and
    the second. Multiplying spreads a difference upwards only, so words that differ in high bits
    alone need the third round. The shifts of 19 and 11 make such pairs as independent as others.
    An arithmetic right shift copies the sign, so the first folds mask the copies away; the last one
    lets them cancel the sign, which maps two words onto each of the 2**31 results: still uniform.
    """
    x = token_words.bitwise_xor(low)
    x.mul_(_FIRST_FACTOR)
    x.bitwise_xor_((x >> 19).bitwise_and_(0x1FFF))
    x.bitwise_xor_(high)
    x.mul_(_SECOND_FACTOR - 2**32)
    x.bitwise_xor_((x >> 11).bitwise_and_(0x1FFFFF))
    x.mul_(_THIRD_FACTOR)
    return x.bitwise_xor_(x >> 16)


def _hash_on_host(keys: Seq[Key], token_words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """`_hash` in numpy."""
    low, high = key_columns(keys)
    x = token_words ^ low
    x *= np.uint32(_FIRST_FACTOR)
    folded = x >> np.uint32(19)
    x ^= folded
    x ^= high
    x *= np.uint32(_SECOND_FACTOR)
    np.right_shift(x, np.uint32(11), out=folded)
    x ^= folded
    x *= np.uint32(_THIRD_FACTOR)
    np.right_shift(x.view(np.int32), np.int32(16), out=folded.view(np.int32))
    x ^= folded
    return x


def key_columns(keys: Seq[Key]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The low and the high halves of the rows' keys, [n, 1] each."""
    row_words = np.array([row_key(*key) for key in keys], dtype=np.uint64)[:, None]
    return row_words.astype(np.uint32), (row_words >> np.uint64(32)).astype(np.uint32)


def row_key(seed: int, position: int) -> int:
    """The 64-bit key of one row: SplitMix64 (Steele, Lea and Flood, 2014) over both."""
    return _splitmix64(_splitmix64(seed & _MASK64) ^ (position & _MASK64))


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def words_of(vocab_size: int) -> npt.NDArray[np.uint32]:
    """`_token_words` of a vocabulary, for compiled code."""
    return token_words_of(vocab_size).numpy().view(np.uint32)


def token_words_of(vocab_size: int) -> Tensor:
    """[vocab] int32, the words that `hashed` mixes with the keys."""
    return _token_words(torch.arange(vocab_size, dtype=torch.int64))


def _token_words(ids: Tensor) -> Tensor:
    """A fixed, mixed and distinct int32 word per vocabulary id (lowbias32, a bijection)."""
    x = (ids * 0x9E3779B1 + 0x85EBCA77) & 0xFFFFFFFF
    for shift, factor in ((16, _FIRST_FACTOR), (15, _SECOND_FACTOR)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)
