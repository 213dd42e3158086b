"""top_k, top_p and min_p without a word to the host: which ids survive, and their logits.

What `engine.sampling.filters` keeps, to the bit: the same prefix of the row in the same order (most
likely first, ties to the lower id), found among its most likely ids on the device where it lies.
Rows that would have to be looked into further are told, and left to the long way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.filters import BELOW_ZERO
from engine.sampling.sampler import ranked

MOST = 1024  # ids of a row that are looked at


class Bounds(NamedTuple):
    """Of rows, `[rows]` each: ids that top_k leaves (int64, the vocabulary if it is off), float64
    top_p, and the logarithm of min_p in float64."""

    sizes: Tensor
    shares: Tensor
    floors: Tensor


class Survivors(NamedTuple):
    """`ids` int64 and `values` float32 `[rows, look]`: logits up to a constant of the row, -inf for
    what was removed. `known` `[rows]`: False where survivors may be missing."""

    ids: Tensor
    values: Tensor
    known: Tensor


def survivors(logits: Tensor, bounds: Bounds, look: int) -> Survivors:
    """Of float32 `[rows, vocab]` logits after temperature, among the `look` most likely ids of each
    row; a row of `bounds.sizes` below the vocabulary must not have more of them."""
    ids = ranked(logits, look)
    top = logits.gather(1, ids)
    last = top[:, -1]
    needed = _needed(logits, top, bounds)
    possible = (top > -torch.inf).sum(dim=1).clamp(min=1)
    counts = torch.minimum(needed, possible)
    bounded = (bounds.sizes < logits.shape[1]) | (bounds.shares < 1)
    least = top.gather(1, counts[:, None] - 1).squeeze(1).where(bounded, -torch.inf)
    floor = (logits.amax(dim=1).double() + bounds.floors).float()
    known = (needed <= look) | (possible < look) | (floor > last)
    least = floor.where(floor > least, least)
    values = top - least[:, None]
    kept = torch.arange(look, device=top.device) < counts[:, None]
    kept &= values > BELOW_ZERO
    if look == logits.shape[1]:
        known = torch.ones_like(known)
    return Survivors(ids, values.where(kept, -torch.inf), known)


def _needed(logits: Tensor, top: Tensor, bounds: Bounds) -> Tensor:
    """`[rows]` how many of the likeliest ids top_k and top_p keep; more than were looked at: at
    least so many. Mass is relative to the likeliest, and summed in order."""
    look, vocab = top.shape[1], logits.shape[1]
    mass = (top.double() - top[:, :1]).exp().cumsum(dim=1)
    total = (logits.logsumexp(dim=1).double() - top[:, 0]).exp()
    among = mass.gather(1, bounds.sizes.clamp(max=look)[:, None] - 1).squeeze(1)
    whole = total.where(bounds.sizes == vocab, among)
    needed = 1 + (mass < (bounds.shares * whole)[:, None]).sum(dim=1)
    return torch.minimum(needed, bounds.sizes).where(bounds.shares < 1, bounds.sizes)
