"""top_k, top_p and min_p over rows of logits, without sorting the vocabulary.

All three keep a prefix of the row in the order (most likely first, ties to the lower id). A row's
result depends on that row alone: how far the others had to be looked into changes the time, never
the values. Knows tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]

_FIRST_LOOK = 64  # most likely ids looked at before more are needed
_GROWTH = 8
_SORT_IS_FASTER = 16
_BELOW_ZERO = -1e-30  # between 0 and any difference of two float32 logits that is below it


def keep_most_likely(
    logits: Tensor, *, top_k: Seq[int], top_p: Seq[float], min_p: Seq[float]
) -> Tensor:
    """[rows, vocab] logits (after temperature) -> the same with what is removed at -inf.

    Per row, in this order: top_k (0 is off) keeps so many ids; top_p the fewest of those that hold
    that share of their mass, one at least; min_p those at least as likely as the likeliest times
    min_p. What is kept may come back shifted by a constant of its row.
    """
    vocab = logits.shape[1]
    sizes = np.array([min(k, vocab) if k > 0 else vocab for k in top_k])
    shares = np.array(top_p, dtype=np.float64)
    cut = np.flatnonzero((sizes < vocab) | (shares < 1))
    kept = logits
    if len(cut) == len(logits):
        kept = _keep_prefix(logits, sizes, shares)
    elif len(cut):
        index = torch.from_numpy(cut).to(logits.device)
        shorter = _keep_prefix(logits[index], sizes[cut], shares[cut])
        kept = logits.index_copy(0, index, shorter)
    if any(min_p):
        share = torch.tensor(min_p, dtype=logits.dtype, device=logits.device).unsqueeze(1)
        floor = kept.amax(dim=1, keepdim=True) + share.log()
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept


@dataclass(frozen=True, slots=True)
class _Prefix:
    """For each row, as far as the most likely ids tell: how many are kept, the least logit among
    them, and whether an id that is not kept ties with it. On the host, where it is decided."""

    counts: Ints
    least: Floats
    tied: npt.NDArray[np.bool_]


def _keep_prefix(logits: Tensor, sizes: Ints, shares: Floats) -> Tensor:
    """Keep the first `size` ids of each row, and of those the first that hold the share. What is
    kept comes back relative to the least of it."""
    vocab = logits.shape[1]
    look = min(max(_FIRST_LOOK, 1 + int(sizes[sizes < vocab].max(initial=0))), vocab)
    found = _prefix(logits, sizes, shares, look)
    while look < vocab:
        # A row that needs all that was looked at may need more.
        short = np.flatnonzero(found.counts == look)
        if not len(short):
            break
        look = min(look * _GROWTH, vocab)
        more = _prefix(logits[short.tolist()], sizes[short], shares[short], look)
        found.counts[short], found.least[short] = more.counts, more.least
        found.tied[short] = more.tied
    least = torch.from_numpy(found.least).to(logits.device).unsqueeze(1)
    kept = F.threshold(logits - least, _BELOW_ZERO, -torch.inf)
    ties = np.flatnonzero(found.tied).tolist()
    if ties:
        surplus = _surplus(logits[ties], least[ties], found.counts[ties])
        kept[ties] = kept[ties].masked_fill(surplus, -torch.inf)
    return kept


def _prefix(logits: Tensor, sizes: Ints, shares: Floats, look: int) -> _Prefix:
    """Decide from the `look` most likely ids. Mass is relative to the likeliest and is summed in
    order, so it does not depend on `look`."""
    vocab, rows = logits.shape[1], np.arange(len(logits))
    top = _largest(logits, look)
    with np.errstate(invalid="ignore"):  # a row that is no number; the sampler refuses it
        mass = np.exp(top.astype(np.float64) - top[:, :1]).cumsum(axis=1)
        whole = mass[rows, np.minimum(sizes, look) - 1]
        unsized = (sizes == vocab) & (shares < 1)
        if unsized.any():
            total = logits.logsumexp(dim=1).cpu().numpy().astype(np.float64)
            whole = np.where(unsized, np.exp(total - top[:, 0]), whole)
    needed = 1 + (mass < (shares * whole)[:, None]).sum(axis=1)
    needed = np.where(shares < 1, needed, sizes)
    possible = np.maximum((top > -np.inf).sum(axis=1), 1)
    counts = np.minimum(np.minimum(needed, sizes), possible)
    least = top[rows, counts - 1]
    tied = (counts < look) & (top[rows, np.minimum(counts, look - 1)] == least)
    return _Prefix(counts, least, tied)


def _largest(logits: Tensor, count: int) -> Floats:
    """[rows, count] largest logits, largest first. On the CPU numpy sorts a row about eight times
    faster than torch, and faster than torch selects a good part of it."""
    if logits.device.type == "cpu" and count * _SORT_IS_FASTER >= logits.shape[1]:
        return np.sort(logits.numpy(), axis=1)[:, ::-1][:, :count]
    values: Floats = logits.topk(count, dim=1).values.cpu().numpy()
    return values


def _surplus(logits: Tensor, least: Tensor, counts: Ints) -> Tensor:
    """Ties with the least kept logit beyond the count; the lower ids were kept."""
    tied = logits == least
    above = (logits > least).sum(dim=1, keepdim=True)
    room = torch.from_numpy(counts).to(logits.device).unsqueeze(1) - above
    return tied & (tied.cumsum(dim=1) > room)
