"""top_k, top_p and min_p over rows of logits, without sorting the vocabulary.

All three keep a prefix of the row in the order (most likely first, ties to the lower id), so all
that is decided is the least logit that stays: on the host, from the most likely few. A row's result
depends on that row alone: how far the others had to be looked into changes the time, never the
values. Knows tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]

_FIRST_LOOK = 64  # most likely ids looked at before more are needed
_GROWTH = 8
_SORT_IS_FASTER = 16
BELOW_ZERO = -1e-30  # between 0 and any difference of two float32 logits that is below it


def keep_most_likely(
    logits: Tensor, *, top_k: Seq[int], top_p: Seq[float], min_p: Seq[float]
) -> Tensor:
    """[rows, vocab] logits (after temperature) -> the same with what is removed at -inf.

    Per row, in this order: top_k (0 is off) keeps so many ids; top_p the fewest of those that hold
    that share of their mass, one at least; min_p those at least as likely as the likeliest times
    min_p. What is kept may come back shifted by a constant of its row.
    """
    cuts = _prefixes(logits, top_k, top_p)
    if any(min_p):
        _raise_to(cuts, logits.amax(dim=1).cpu().numpy(), np.array(min_p))
    cut = np.flatnonzero(cuts.least > -np.inf)
    if len(cut) == logits.shape[0]:
        return _removed(logits, cuts)
    index = torch.from_numpy(cut).to(logits.device)
    return logits.index_copy(0, index, _removed(logits[index], cuts.of(cut)))


@dataclass(slots=True)
class _Cuts:
    """Per row: the least logit that stays (-inf: all of them), how many ids stay, and whether an id
    that does not stay ties with the least."""

    least: Floats
    counts: Ints
    tied: Bools

    def of(self, rows: Ints) -> _Cuts:
        return _Cuts(self.least[rows], self.counts[rows], self.tied[rows])

    def put(self, rows: Ints, cuts: _Cuts) -> None:
        self.least[rows], self.counts[rows], self.tied[rows] = cuts.least, cuts.counts, cuts.tied


def _removed(logits: Tensor, cuts: _Cuts) -> Tensor:
    """What stays, relative to the least of it; -inf elsewhere."""
    least = torch.from_numpy(cuts.least).to(logits.device).unsqueeze(1)
    kept = torch.threshold(logits - least, BELOW_ZERO, -torch.inf)
    ties = np.flatnonzero(cuts.tied)
    if len(ties):
        index = torch.from_numpy(ties).to(logits.device)
        surplus = _surplus(logits[index], least[index], cuts.counts[ties])
        kept[index] = kept[index].masked_fill(surplus, -torch.inf)
    return kept


def _surplus(logits: Tensor, least: Tensor, counts: Ints) -> Tensor:
    """Ties with the least kept logit beyond the count; the lower ids stay."""
    tied = logits == least
    above = (logits > least).sum(dim=1, keepdim=True)
    room = torch.from_numpy(counts).to(logits.device).unsqueeze(1) - above
    return tied & (tied.cumsum(dim=1) > room)


def _raise_to(cuts: _Cuts, best: Floats, share: Floats) -> None:
    """min_p: nothing below the share of the likeliest stays either."""
    with np.errstate(divide="ignore", invalid="ignore"):
        floor = (best + np.log(share)).astype(np.float32)
    higher = floor > cuts.least
    cuts.least = np.where(higher, floor, cuts.least)
    cuts.tied &= ~higher


def _prefixes(logits: Tensor, top_k: Seq[int], top_p: Seq[float]) -> _Cuts:
    """top_k and top_p, looking further into those rows that need it."""
    count, vocab = logits.shape
    sizes = np.array([min(k, vocab) if k > 0 else vocab for k in top_k])
    shares = np.array(top_p, dtype=np.float64)
    cuts = _Cuts(
        np.full(count, -np.inf, dtype=np.float32), sizes.copy(), np.zeros(count, dtype=np.bool_)
    )
    rows = np.flatnonzero((sizes < vocab) | (shares < 1))
    look = min(max(_FIRST_LOOK, 1 + int(sizes[sizes < vocab].max(initial=0))), vocab)
    while len(rows):
        part = logits if len(rows) == count else logits[torch.from_numpy(rows).to(logits.device)]
        found = _prefix(part, sizes[rows], shares[rows], look)
        cuts.put(rows, found)
        if look == vocab:
            break
        rows = rows[found.counts == look]  # all that was looked at stays, and perhaps more
        look = min(look * _GROWTH, vocab)
    return cuts


def _prefix(logits: Tensor, sizes: Ints, shares: Floats, look: int) -> _Cuts:
    """Decide from the `look` most likely ids. Mass is relative to the likeliest and is summed in
    order, so it does not depend on `look`."""
    rows = np.arange(len(sizes))
    top = _largest(logits, look)
    counts = sizes
    if (shares < 1).any():
        needed = _needed(logits, top, sizes, shares)
        counts = np.where(shares < 1, np.minimum(needed, sizes), sizes)
    possible = np.maximum((top > -np.inf).sum(axis=1), 1)
    counts = np.minimum(counts, possible)
    least = top[rows, counts - 1]
    tied = (counts < look) & (top[rows, np.minimum(counts, look - 1)] == least)
    return _Cuts(least, counts, tied)


def _needed(logits: Tensor, top: Floats, sizes: Ints, shares: Floats) -> Ints:
    """top_p: how many of the likeliest ids hold the share of what top_k left."""
    look, vocab = top.shape[1], logits.shape[1]
    with np.errstate(invalid="ignore"):  # a row that is no number; the sampler refuses it
        mass = np.exp(top.astype(np.float64) - top[:, :1]).cumsum(axis=1)
        whole = mass[np.arange(len(sizes)), np.minimum(sizes, look) - 1]
        if (sizes == vocab).any():
            total = logits.logsumexp(dim=1).cpu().numpy().astype(np.float64)
            whole = np.where(sizes == vocab, np.exp(total - top[:, 0]), whole)
    needed: Ints = 1 + (mass < (shares * whole)[:, None]).sum(axis=1)
    return needed


def _largest(logits: Tensor, count: int) -> Floats:
    """[rows, count] largest logits, largest first. On the CPU numpy sorts a row about eight times
    faster than torch, and faster than torch selects a good part of it."""
    if logits.device.type == "cpu" and count * _SORT_IS_FASTER >= logits.shape[1]:
        return np.sort(logits.numpy(), axis=1)[:, ::-1][:, :count]
    values: Floats = logits.topk(count, dim=1).values.cpu().numpy()
    return values
