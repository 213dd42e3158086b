"""top_k, top_p and min_p over rows of logits, without sorting the vocabulary.

All three keep a prefix of the row in the order (most likely first, ties to the lower id). A row's
result depends on that row alone: how far the others had to be looked into changes the time, never
the values. Knows tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
    sizes = [min(k, vocab) if k > 0 else vocab for k in top_k]
    cut = [i for i, size in enumerate(sizes) if size < vocab or top_p[i] < 1.0]
    kept = logits
    if cut:
        rows = logits if len(cut) == len(logits) else logits[cut]
        shorter = _keep_prefix(rows, [sizes[i] for i in cut], [top_p[i] for i in cut])
        kept = (
            shorter
            if len(cut) == len(logits)
            else logits.index_copy(0, torch.tensor(cut, device=logits.device), shorter)
        )
    if any(min_p):
        share = torch.tensor(min_p, dtype=logits.dtype, device=logits.device).unsqueeze(1)
        floor = kept.amax(dim=1, keepdim=True) + share.log()
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept


def _keep_prefix(logits: Tensor, sizes: list[int], shares: list[float]) -> Tensor:
    """Keep the first `size` ids of each row, and of those the first that hold the share. What is
    kept comes back relative to the least of it."""
    vocab = logits.shape[1]
    look = min(max([_FIRST_LOOK, *(1 + size for size in sizes if size < vocab)]), vocab)
    counts, least, tied = _prefix(logits, sizes, shares, look)
    while look < vocab:
        # A row that needs all that was looked at may need more.
        short = [i for i, count in enumerate(counts.tolist()) if count == look]
        if not short:
            break
        look = min(look * _GROWTH, vocab)
        counts[short], least[short], tied[short] = _prefix(
            logits[short], [sizes[i] for i in short], [shares[i] for i in short], look
        )
    kept = F.threshold(logits - least, _BELOW_ZERO, -torch.inf)
    ties = [i for i, more in enumerate(tied.tolist()) if more]
    if ties:
        surplus = _surplus(logits[ties], least[ties], counts[ties])
        kept[ties] = kept[ties].masked_fill(surplus, -torch.inf)
    return kept


def _prefix(
    logits: Tensor, sizes: list[int], shares: list[float], look: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row, as far as the `look` most likely ids tell: how many are kept [rows], the least
    logit among them [rows, 1], and whether an id that is not kept ties with it [rows].

    Mass is relative to the likeliest id and is summed in order, so it does not depend on `look`."""
    device, vocab = logits.device, logits.shape[1]
    top = _largest(logits, look)
    best = top[:, :1]
    mass = (top - best).double().exp_().cumsum(dim=1)
    size = torch.tensor(sizes, device=device).unsqueeze(1)
    share = torch.tensor(shares, dtype=torch.float64, device=device).unsqueeze(1)
    whole = mass.gather(1, (size - 1).clamp_(max=look - 1))
    if any(s == vocab and p < 1.0 for s, p in zip(sizes, shares, strict=True)):
        total = (logits.logsumexp(dim=1, keepdim=True) - best).double().exp_()
        whole = torch.where(size < vocab, whole, total)
    needed = 1 + (mass < share * whole).sum(dim=1, keepdim=True)
    needed = torch.where(share < 1.0, needed, size)
    possible = (top > -torch.inf).sum(dim=1, keepdim=True).clamp_(min=1)
    counts = torch.minimum(torch.minimum(needed, size), possible)
    least = top.gather(1, counts - 1)
    tied = (counts < look) & (top.gather(1, counts.clamp(max=look - 1)) == least)
    return counts.squeeze(1), least, tied.squeeze(1)


def _largest(logits: Tensor, count: int) -> Tensor:
    """[rows, count] largest logits, largest first. On the CPU numpy sorts a row about eight times
    faster than torch, and faster than torch selects a good part of it."""
    if logits.device.type == "cpu" and count * _SORT_IS_FASTER >= logits.shape[1]:
        ascending = np.sort(logits.numpy(), axis=1)
        return torch.from_numpy(ascending).flip(1)[:, :count]
    return logits.topk(count, dim=1).values


def _surplus(logits: Tensor, least: Tensor, counts: Tensor) -> Tensor:
    """Ties with the least kept logit beyond the count; the lower ids were kept."""
    tied = logits == least
    above = (logits > least).sum(dim=1, keepdim=True)
    return tied & (tied.cumsum(dim=1) > counts.unsqueeze(1) - above)
