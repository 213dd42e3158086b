"""From scores to tokens, and from raw logits to the log-probabilities that a user sees."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.sampling.filters import ELEMENTS_AT_ONCE, ranked
from engine.sampling.plain import MOST_SURE, NOT_FINITE


def best_and_lead(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] the lowest id of each row's largest score, NOT_FINITE where that is no finite number;
    and the score less the second largest, at most MOST_SURE, 0 where there is none."""
    best, ids = scores.max(dim=1)
    second = scores.scatter(1, ids[:, None], -torch.inf).amax(dim=1)
    leads = (best - second).nan_to_num(0.0, MOST_SURE).clamp(0.0, MOST_SURE)
    return ids.masked_fill(~best.isfinite(), NOT_FINITE), leads


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
