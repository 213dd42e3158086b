"""top_k, top_p and min_p over rows of logits, without sorting the vocabulary.

All three keep a prefix of the row in the order (most likely first, ties to the lower id). A row's
result depends on that row alone: how far the others had to be looked into changes the time, never
the values. Knows tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

_FIRST_LOOK = 64  # most likely ids looked at before more are needed
_GROWTH = 8


def keep_most_likely(
    logits: Tensor, *, top_k: Seq[int], top_p: Seq[float], min_p: Seq[float]
) -> Tensor:
    """[rows, vocab] logits (after temperature) -> the same with what is removed at -inf.

    Per row, in this order: top_k (0 is off) keeps so many ids; top_p the fewest of those that hold
    that share of their mass, one at least; min_p those at least as likely as the likeliest times
    min_p.
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
        floor = logits.amax(dim=1, keepdim=True) + share.log()
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept


def _keep_prefix(logits: Tensor, sizes: list[int], shares: list[float]) -> Tensor:
    """Keep the first so many ids of each row, and of those the first that hold the share."""
    vocab = logits.shape[1]
    look = min(max([_FIRST_LOOK, *(size for size in sizes if size < vocab)]), vocab)
    counts, least = _prefix(logits, sizes, shares, look)
    while look < vocab:
        # A row that used up all that was looked at, and may keep more, is looked into further.
        short = [i for i, count in enumerate(counts.tolist()) if count == look and sizes[i] > look]
        if not short:
            break
        look = min(look * _GROWTH, vocab)
        more = _prefix(logits[short], [sizes[i] for i in short], [shares[i] for i in short], look)
        counts[short], least[short] = more
    keep = logits >= least.unsqueeze(1)
    if bool((keep.sum(dim=1) > counts).any()):
        keep &= ~_surplus(logits, least, counts)
    return logits.masked_fill(~keep, -torch.inf)


def _prefix(
    logits: Tensor, sizes: list[int], shares: list[float], look: int
) -> tuple[Tensor, Tensor]:
    """How many ids each row keeps, and the least logit among them, seen within the `look` most
    likely. The running mass is summed in order, so it does not depend on `look`."""
    device = logits.device
    top = logits.topk(look, dim=1).values
    mass = (top - logits.logsumexp(dim=1, keepdim=True)).double().exp().cumsum(dim=1)
    size = torch.tensor(sizes, device=device).unsqueeze(1)
    share = torch.tensor(shares, dtype=torch.float64, device=device).unsqueeze(1)
    whole = torch.ones_like(share)
    if any(s < logits.shape[1] for s in sizes):
        within = mass.gather(1, (size - 1).clamp(max=look - 1))
        whole = torch.where(size < logits.shape[1], within, whole)
    needed = 1 + (mass < share * whole).sum(dim=1, keepdim=True)
    needed = torch.where(share < 1.0, needed, size)
    counts = torch.minimum(needed, size).clamp(max=look)
    return counts.squeeze(1), top.gather(1, counts - 1).squeeze(1)


def _surplus(logits: Tensor, least: Tensor, counts: Tensor) -> Tensor:
    """Ties with the least kept logit beyond the count; the lower ids were kept."""
    tied = logits == least.unsqueeze(1)
    above = (logits > least.unsqueeze(1)).sum(dim=1, keepdim=True)
    return tied & (tied.cumsum(dim=1) > counts.unsqueeze(1) - above)
