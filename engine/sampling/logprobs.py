"""The log-probabilities that a user sees."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.sampling.filters import ranked

ELEMENTS_AT_ONCE = 2**24  # of logits ranked at once, to bound the memory


def token_logprobs(
    logits: Tensor, rows: Seq[int], tokens: Seq[int], counts: Seq[int]
) -> list[TokenLogprobs]:
    """Log-probabilities under the model itself, for prompt rows and generated ones alike. One copy
    from the device.

    `logits` [all rows, vocab] raw; the i-th answer is about `tokens[i]` at row `rows[i]`, with the
    `counts[i]` most likely ids of that row, most likely first, ties to the lower id.
    """
    if not rows:
        return []
    there = torch.tensor([list(rows), list(tokens)]).to(logits.device, non_blocking=True)
    return told(scores(logits, there[0], there[1], max(counts)).tolist(), tokens, counts)


def scores(logits: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Float64 `[rows, 2 + 2 * count]`, still to be computed when this returns: of each of `tokens`
    int64 at the row of `logits` in `rows` int64 its log-probability and its rank, then the row's
    `count` most likely ids, and theirs."""
    piece, count = max(ELEMENTS_AT_ONCE // logits.shape[1], 1), min(count, logits.shape[1])
    return torch.cat(
        [
            _scored(logits.index_select(0, some), own, count)
            for some, own in zip(torch.split(rows, piece), torch.split(tokens, piece), strict=True)
        ]
    )


def _scored(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    log_probs, chosen = logits.log_softmax(dim=1), tokens[:, None]
    own = log_probs.gather(1, chosen)
    every = torch.arange(log_probs.shape[1], device=logits.device)
    before = (log_probs > own) | ((log_probs == own) & (every < chosen))  # of equals, lower ids
    ranks = before.sum(dim=1, keepdim=True) + 1
    if not count:
        return torch.cat([own.double(), ranks.double()], dim=1)
    ids = ranked(log_probs, count)
    tops = log_probs.gather(1, ids)
    return torch.cat([own.double(), ranks.double(), ids.double(), tops.double()], dim=1)


def told(numbers: Seq[Seq[float]], tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprobs]:
    """What `scores` answered, and the tokens it was asked about, each with so many most likely
    ids."""
    found = []
    for row, token, count in zip(numbers, tokens, counts, strict=True):
        middle = (len(row) + 2) // 2
        ids = [int(number) for number in row[2 : 2 + min(count, middle - 2)]]
        top = list(zip(ids, row[middle : middle + count], strict=True))
        found.append(TokenLogprobs(token, row[0], top, int(row[1])))
    return found
