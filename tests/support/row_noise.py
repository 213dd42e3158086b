"""The noise of whole rows, by their keys."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.noise import gumbel_of, hashed, splitmix64, token_words_of

Key = tuple[int, int]  # (seed of 64 bits, absolute position)


def gumbel(keys: Seq[Key | None], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 `[len(keys), vocab]` Gumbel noise, between -2.9 and 22.2; zeros for None."""
    halves = (torch.from_numpy(half.view(np.int32)).to(device) for half in key_columns(keys))
    noise = gumbel_of(hashed(token_words_of(vocab_size, device), *halves))
    drawn = torch.tensor([key is not None for key in keys]).to(device)
    return noise.where(drawn[:, None], 0.0)


def key_columns(
    keys: Seq[Key | None],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the low and the high halves of the rows' keys, `[n, 1]` each; arbitrary for None."""
    row_words = np.array([row_key(*(key or (0, 0))) for key in keys], dtype=np.uint64)[:, None]
    return row_words.astype(np.uint32), (row_words >> np.uint64(32)).astype(np.uint32)


def row_key(seed: int, position: int) -> int:
    """Return a row's 64-bit key: SplitMix64 (Steele, Lea and Flood, 2014) of seed and position."""
    key: int = splitmix64(splitmix64(seed % 2**64) ^ position % 2**64)
    return key
