"""top_k, top_p and min_p over rows of logits, without reading any on the host: the surviving ids
and their logits.

Per row, in this order: top_k keeps the k most likely ids; top_p the fewest of those that hold the
share top_p of their mass, at least one; min_p those with at least min_p times the highest
probability. All three keep a prefix of the row in the order (most likely first, ties to the lower
id), so only the most likely ids are ranked, on the device. A row's result depends only on that row,
not on the number of ranked ids.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.plain import BELOW_ZERO, Plain
from engine.sampling.triton_draws import MOST_RANKED

MOST = MOST_RANKED  # ids ranked first in a row without top_k


class Bounds(NamedTuple):
    """Per row, `[rows]` each. `sizes`: ids that top_k keeps (int64; the vocabulary size if off);
    `shares`: top_p (float64); `floors`: log of min_p (float64)."""

    sizes: Tensor
    shares: Tensor
    floors: Tensor


class Survivors(NamedTuple):
    """`ids` int64 and `values` float32 `[rows, num_ranked]`: logits up to a constant per row, -inf
    if removed. `known` `[rows]`: False if survivors may be missing."""

    ids: Tensor
    values: Tensor
    known: Tensor


def num_ranked_of(plains: Seq[Plain], vocab_size: int) -> int:
    """Return how many ids of each row to rank first: the largest top_k; `MOST` for rows without."""
    sizes = [plain.top_k or vocab_size for plain in plains]
    cut = [size for size in sizes if size < vocab_size]
    return min(max(cut if len(cut) == len(sizes) else [MOST, *cut]), vocab_size)


def survivors(logits: Tensor, bounds: Bounds, num_ranked: int) -> Survivors:
    """Return the survivors of float32 `[rows, vocab]` logits after temperature, among the
    `num_ranked` most likely ids of each row. `bounds.sizes` below the vocabulary must not exceed
    `num_ranked`."""
    ids = ranked(logits, num_ranked)
    top = logits.gather(1, ids)
    last = top[:, -1]
    needed = _needed(logits, top, bounds)
    possible = (top > -torch.inf).sum(dim=1).clamp(min=1)
    counts = torch.minimum(needed, possible)
    bounded = (bounds.sizes < logits.shape[1]) | (bounds.shares < 1)
    least = top.gather(1, counts[:, None] - 1).squeeze(1).where(bounded, -torch.inf)
    floor = (logits.amax(dim=1).double() + bounds.floors).float()
    known = (needed <= num_ranked) | (possible < num_ranked) | (floor > last)
    least = floor.where(floor > least, least)
    above = top - least[:, None]
    kept = torch.arange(num_ranked, device=top.device) < counts[:, None]
    kept &= above > BELOW_ZERO
    values = above.where(above < torch.inf, top)  # no filter applies
    if num_ranked == logits.shape[1]:
        known = torch.ones_like(known)
    return Survivors(ids, values.where(kept, -torch.inf), known)


def _needed(logits: Tensor, top: Tensor, bounds: Bounds) -> Tensor:
    """Return, `[rows]`, how many of the most likely ids top_k and top_p keep; a value above
    `num_ranked` is a lower bound. Mass is relative to the most likely id, and summed in order."""
    num_ranked, vocab = top.shape[1], logits.shape[1]
    mass = (top.double() - top[:, :1]).exp().cumsum(dim=1)
    total = (logits.logsumexp(dim=1).double() - top[:, 0]).exp()
    among = mass.gather(1, bounds.sizes.clamp(max=num_ranked)[:, None] - 1).squeeze(1)
    whole = total.where(bounds.sizes == vocab, among)
    needed = 1 + (mass < (bounds.shares * whole)[:, None]).sum(dim=1)
    return torch.minimum(needed, bounds.sizes).where(bounds.shares < 1, bounds.sizes)


def ranked(values: Tensor, count: int) -> Tensor:
    """Return `[rows, count]` ids of the largest values, ties to the lower id. Sorts int64 keys: the
    value's bits, made to order like integers, above the reversed id."""
    bits = (values + 0.0).contiguous().view(torch.int32)  # + 0.0: no negative zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    packed = (ordered.to(torch.int64) << 32) | ids
    return packed.topk(count, dim=1).indices
