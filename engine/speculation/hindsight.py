"""What the drafter would have guessed at positions that are committed by now.

Under sample-and-match a guess is right if it equals the committed token, verified or not. The
drafter runs every committed position sooner or later (the one behind a fully accepted proposal, a
spell at K = 0): the rows of that catch-up, drawn from as a guess would be, say how often it agrees
without anything being risked, and without the censoring of what a rejection hides. Only for
requests whose logits are merely scaled; what depends on the history would have to be redone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.sampling.noise import Key
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.speculation.proposer import Agreement

MOST_ROWS = 32  # of a sequence, the latest; so that logits stay small


def rows_to_judge(seq: Sequence, start: int, scale: float | None) -> int:
    """Of the positions from `start` to the last but one, how many predict a generated token."""
    if scale is None:
        return 0
    missed = seq.num_tokens - 1 - max(start, seq.num_prompt - 1)
    return min(max(missed, 0), MOST_ROWS)


def judge(
    logits: Tensor,
    seqs: Seq[Sequence],
    counts: Seq[int],
    scales: Seq[float | None],
    sampler: Sampler,
) -> tuple[Tensor, list[Agreement]]:
    """`logits` `[sum(counts) + sequences, vocab]`: of each sequence, the rows to judge and the row
    behind its last token. The latter `[sequences, vocab]`, and what the former say."""
    if not any(counts):
        return logits, []
    rows, last, factors, keys = list[int](), list[int](), list[float](), list[Key | None]()
    row = 0
    for seq, count, scale in zip(seqs, counts, scales, strict=True):
        rows += range(row, row + count)
        row += count + 1
        last.append(row - 1)
        factors += [scale or 1.0] * count
        drawn = seq.params.temperature > 0
        keys += [(seq.params.seed, p) if drawn else None for p in _positions(seq, count)]
    factor = torch.tensor(factors, device=logits.device).unsqueeze(1)
    tokens, leads = sampler.judge(logits[rows] * factor, keys)
    found, at = [], 0
    for seq, count in zip(seqs, counts, strict=True):
        if count:
            known = seq.tokens[-count:]
            hits = [a == b for a, b in zip(tokens[at : at + count], known, strict=True)]
            found.append(Agreement(seq, seq.num_tokens - count, hits, leads[at : at + count]))
            at += count
    return logits[last], found


def _positions(seq: Sequence, count: int) -> range:
    """Of the last `count` tokens."""
    return range(seq.num_tokens - count, seq.num_tokens)
