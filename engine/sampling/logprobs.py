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
    """Log-probabilities under the model itself, for prompt rows and generated ones alike.

    `logits` [all rows, vocab] raw; the i-th answer is about `tokens[i]` at row `rows[i]`, with the
    `counts[i]` most likely ids of that row, most likely first, ties to the lower id.
    """
    answers: list[TokenLogprobs] = []
    piece = max(ELEMENTS_AT_ONCE // logits.shape[1], 1)
    for start in range(0, len(rows), piece):
        part = slice(start, start + piece)
        answers += _scored(logits[list(rows[part])], tokens[part], counts[part])
    return answers


def _scored(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprobs]:
    log_probs = logits.log_softmax(dim=1)
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    own = log_probs.gather(1, chosen)
    every = torch.arange(log_probs.shape[1], device=logits.device)
    before = (log_probs > own) | ((log_probs == own) & (every < chosen))  # of equals, lower ids
    ranks = (before.sum(dim=1) + 1).tolist()
    ids = ranked(log_probs, min(max(counts), logits.shape[1]))
    tops = log_probs.gather(1, ids).tolist()
    return [
        TokenLogprobs(token, value, list(zip(row_ids[:count], row_tops[:count], strict=True)), rank)
        for token, value, count, row_ids, row_tops, rank in zip(
            tokens, own.squeeze(1).tolist(), counts, ids.tolist(), tops, ranks, strict=True
        )
    ]
