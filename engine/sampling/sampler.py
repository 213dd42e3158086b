"""From final log-probabilities to tokens, and from raw logits to the log-probabilities a user sees.

A draw is a function of (the row's log-probabilities, seed, absolute position) alone: the argmax of
log-probability plus keyed Gumbel noise. Temperature 0 is the argmax. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.sampling.logits import RowContext
from engine.sampling.noise import Key, KeyedNoise

MOST_SURE = 99.0  # the largest lead that is told
NOT_FINITE = -1  # in place of a token: nothing can be drawn from that row
_ELEMENTS_AT_ONCE = 2**24  # of logits ranked at once, to bound the memory


class Sampler:
    """Draws for the target and for the drafter. Share one object between both: they need the same
    noise, and it is computed once. Sized by the first logits it meets."""

    def __init__(self) -> None:
        self._noise: KeyedNoise | None = None

    def sample(self, log_probs: Tensor, contexts: Seq[RowContext]) -> Tensor:
        """[rows, vocab] final log-probabilities -> [rows] int64 tokens on the same device, or
        NOT_FINITE where a row holds NaN or +inf, or nothing but -inf."""
        keys = [_key(context) for context in contexts]
        if any(keys):
            log_probs = log_probs + self._for(log_probs).rows(keys)
        return _argmax(log_probs)

    def guess(self, log_probs: Tensor, contexts: Seq[RowContext]) -> tuple[list[int], list[float]]:
        """As `sample`, and how far each token's score lies above the next: a draw with the same
        noise from another model's distribution is the likelier to agree, the larger that is."""
        keys = [_key(context) for context in contexts]
        return self.judge(log_probs, keys)

    def judge(self, scores: Tensor, keys: Seq[Key | None]) -> tuple[list[int], list[float]]:
        """`guess`, by the keys of the rows' noise (None: without)."""
        if any(keys):
            scores = scores + self._for(scores).rows(keys)
        if scores.device.type != "cpu":
            return _told_at_once(scores)
        tokens: list[int] = _argmax(scores).tolist()
        return tokens, _leads(scores, tokens)

    def prefetch(self, log_probs: Tensor, keys: Seq[Key]) -> None:
        """Compute the noise of these (seed, position) pairs in one go, for rows that are as wide
        and on the same device as `log_probs`. Changes no result."""
        self._for(log_probs).prefetch(keys)

    def noise(self, like: Tensor, keys: Seq[Key | None]) -> Tensor | None:
        """[len(keys), vocab] noise as `sample` adds it, zeros for None; None if all are None.
        Valid until the next call of anything here."""
        return self._for(like).rows(keys) if any(keys) else None

    def _for(self, log_probs: Tensor) -> KeyedNoise:
        if self._noise is None:
            self._noise = KeyedNoise(log_probs.shape[1], device=log_probs.device)
        return self._noise


def _argmax(scores: Tensor) -> Tensor:
    """[rows] lowest id of each row's largest score; NOT_FINITE where that is no finite number."""
    if scores.device.type == "cpu":  # numpy's is some ten times faster than torch's
        table = scores.numpy()
        tokens = table.argmax(axis=1)
        best = table[np.arange(len(table)), tokens]
        return torch.from_numpy(np.where(np.isfinite(best), tokens, NOT_FINITE))
    largest, ids = scores.max(dim=1)
    return ids.masked_fill_(~largest.isfinite(), NOT_FINITE)


def _leads(scores: Tensor, tokens: list[int]) -> list[float]:
    """[rows] each row's largest score less its second largest, at most MOST_SURE; 0 where there is
    nothing to compare. `tokens` are where the largest stand."""
    if scores.shape[1] < 2:
        return [0.0] * len(scores)
    table, rows = scores.numpy(), np.arange(len(scores))
    best = table[rows, tokens]
    table[rows, tokens] = -np.inf
    second = table.max(axis=1)
    table[rows, tokens] = best
    with np.errstate(invalid="ignore"):
        leads = np.nan_to_num(best - second, nan=0.0, posinf=MOST_SURE)
    return np.clip(leads, 0.0, MOST_SURE).tolist()  # type: ignore[no-any-return]


def best_and_lead(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] what `_argmax` and `_leads` say, without a word to the host."""
    best, ids = scores.max(dim=1)
    second = scores.scatter(1, ids[:, None], -torch.inf).amax(dim=1)
    leads = (best - second).nan_to_num(0.0, MOST_SURE).clamp(0.0, MOST_SURE)
    return ids.masked_fill(~best.isfinite(), NOT_FINITE), leads


def _told_at_once(scores: Tensor) -> tuple[list[int], list[float]]:
    """In one copy from the device: float64 holds every id."""
    tokens, leads = torch.stack([part.double() for part in best_and_lead(scores)]).tolist()
    return [int(token) for token in tokens], leads


def _key(context: RowContext) -> Key | None:
    params = context.seq.params
    return (params.seed, context.position) if params.temperature > 0 else None


def token_logprobs(
    logits: Tensor, rows: Seq[int], tokens: Seq[int], counts: Seq[int]
) -> list[TokenLogprobs]:
    """Log-probabilities under the model itself, for prompt rows and generated ones alike.

    `logits` [all rows, vocab] raw; the i-th answer is about `tokens[i]` at row `rows[i]`, with the
    `counts[i]` most likely ids of that row, most likely first, ties to the lower id.
    """
    answers: list[TokenLogprobs] = []
    piece = max(_ELEMENTS_AT_ONCE // logits.shape[1], 1)
    for start in range(0, len(rows), piece):
        part = slice(start, start + piece)
        answers += _scored(logits[list(rows[part])], tokens[part], counts[part])
    return answers


def _scored(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprobs]:
    log_probs = logits.log_softmax(dim=1)
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    values = log_probs.gather(1, chosen).squeeze(1).tolist()
    ranks = _ranks(log_probs, chosen)
    ids = ranked(log_probs, min(max(counts), logits.shape[1]))
    tops = log_probs.gather(1, ids).tolist()
    return [
        TokenLogprobs(token, value, list(zip(row_ids[:count], row_tops[:count], strict=True)), rank)
        for token, value, count, row_ids, row_tops, rank in zip(
            tokens, values, counts, ids.tolist(), tops, ranks, strict=True
        )
    ]


def _ranks(values: Tensor, chosen: Tensor) -> list[int]:
    """One more than the number of ids before the chosen one: likelier, or as likely and lower."""
    own = values.gather(1, chosen)
    ids = torch.arange(values.shape[1], device=values.device)
    before = (values > own) | ((values == own) & (ids < chosen))
    ranks: list[int] = (before.sum(dim=1) + 1).tolist()
    return ranks


def ranked(values: Tensor, count: int) -> Tensor:
    """[rows, count] ids of the largest values, ties to the lower id: the value's bits, made to
    order like integers, with the reversed id below them, in one int64."""
    bits = (values + 0.0).contiguous().view(torch.int32)  # + 0.0: no negative zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    packed = (ordered.to(torch.int64) << 32) | ids
    return packed.topk(count, dim=1).indices
