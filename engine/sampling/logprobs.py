"""Log-probabilities that are returned to users."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.sampling import triton_draws
from engine.sampling.filters import ranked
from engine.sampling.triton_draws import MOST_RANKED, has_kernels

ELEMENTS_AT_ONCE = 2**24  # of logits ranked at once, to bound the memory


def token_logprobs(
    logits: Tensor, rows: Seq[int], tokens: Seq[int], counts: Seq[int]
) -> list[TokenLogprobs]:
    """Return log-probabilities under the model itself, for prompt and generated tokens alike. One
    copy from the device.

    `logits` [all rows, vocab] raw; the i-th result is for `tokens[i]` at row `rows[i]`, with the
    `counts[i]` most likely ids of that row, most likely first, ties to the lower id.
    """
    if not rows:
        return []
    indices = torch.tensor([list(rows), list(tokens)]).to(logits.device, non_blocking=True)
    numbers = scores(logits, indices[0], indices[1], max(counts)).tolist()
    return from_scores(np.array(numbers), tokens, counts)


def scores(logits: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return float64 `[rows, 2 + 2 * count]`, possibly still being computed: for each of `tokens`
    (any type; below 0 counts as 0) at its row of `logits` (`rows` int64) log-probability and rank,
    then the row's `count` most likely ids, and their log-probabilities."""
    piece, count = max(ELEMENTS_AT_ONCE // logits.shape[1], 1), min(count, logits.shape[1])
    if count <= MOST_RANKED and has_kernels(logits.device):
        return triton_draws.scores(logits, rows, tokens.double(), count)  # one kernel for all
    pieces = zip(torch.split(rows, piece), torch.split(tokens, piece), strict=True)
    scored = [
        _scored(logits.index_select(0, some), chosen.clamp(min=0).long()[:, None], count)
        for some, chosen in pieces
    ]
    return torch.cat(scored)


def _scored(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    every, score = torch.arange(logits.shape[1], device=logits.device), logits.gather(1, tokens)
    before = (logits > score) | ((logits == score) & (every < tokens))  # ties: lower ids first
    ranks = before.sum(dim=1, keepdim=True) + 1
    ids, log_probs = ranked(logits, count), logits.log_softmax(dim=1)
    score, tops = log_probs.gather(1, tokens), log_probs.gather(1, ids)
    return torch.cat([score.double(), ranks.double(), ids.double(), tops.double()], dim=1)


def from_scores(
    numbers: npt.NDArray[np.float64], tokens: Seq[int], counts: Seq[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of `tokens` from the rows of `scores`, with the `counts` most
    likely ids of each row."""
    middle = 1 + numbers.shape[1] // 2
    ranks, ids = (numbers[:, part].astype(np.int64) for part in (1, slice(2, middle)))
    tops = [*zip(ids.ravel().tolist(), numbers[:, middle:].ravel().tolist(), strict=True)]
    width = middle - 2
    firsts = [row * width for row in range(len(numbers))]
    each = zip(tokens, counts, firsts, numbers[:, 0].tolist(), ranks.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, tops[first : first + min(count, width)], rank)
        for token, count, first, value, rank in each
    ]
