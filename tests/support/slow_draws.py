"""The reference for drawing a token: each step in turn, over the whole row. The engine, which uses
fewer passes, must draw the same tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.sampling.device_draws import best_and_margin
from engine.sampling.filters import Bounds, survivors
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import Plain, plain_of
from tests.support.row_noise import Key, gumbel


def finalize(processor: LogitsProcessor, logits: Tensor, contexts: Seq[RowContext]) -> Tensor:
    """[rows, vocab] float32 logits, one context per row -> [rows, vocab] log-probabilities, up to a
    constant per row."""
    out = processor.adjust(logits, contexts)
    settings = [plain_of(context.seq.params) for context in contexts]
    scales = torch.tensor([plain.scale or 1.0 for plain in settings], device=out.device)
    out = out * scales[:, None]
    rows = [i for i, plain in enumerate(settings) if plain.is_filtered(logits.shape[1])]
    if rows:
        out[rows] = keep_most_likely(out[rows], [settings[row] for row in rows])
    return out


def keep_most_likely(logits: Tensor, settings: Seq[Plain]) -> Tensor:
    """[rows, vocab] logits after temperature -> the same with removed tokens at -inf."""
    vocab = logits.shape[1]
    bounds = [(min(p.top_k or vocab, vocab), p.top_p, p.floor) for p in settings]
    sizes, shares, floors = torch.tensor(bounds, dtype=torch.float64, device=logits.device).T
    found = survivors(logits, Bounds(sizes.long(), shares, floors), vocab)
    kept = torch.full_like(logits, -torch.inf).scatter_(1, found.ids, found.values)
    finite = logits.amax(dim=1, keepdim=True).isfinite()
    return kept.where(finite, torch.nan)


def sample(log_probs: Tensor, contexts: Seq[RowContext]) -> Tensor:
    """[rows, vocab] final log-probabilities -> [rows] int64 tokens on the same device: the argmax
    of log-probability plus keyed Gumbel noise; NOT_FINITE if a row holds NaN or +inf, or only
    -inf."""
    return sample_with_margin(log_probs, contexts)[0]


def sample_with_margin(
    log_probs: Tensor, contexts: Seq[RowContext]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sample`, with each token's margin and the second-best token; see `best_and_margin`."""
    keys = [_key(context) for context in contexts]
    noise = gumbel(keys, log_probs.shape[1], log_probs.device)
    scores = log_probs + noise
    return *best_and_margin(scores)[:2], second_best(scores)


def second_best(scores: Tensor) -> Tensor:
    """Return the second id of each row by descending score, ties by ascending id; -1 if its score
    is not finite."""
    ordered = scores.sort(dim=1, descending=True, stable=True)
    return ordered.indices[:, 1].masked_fill(~ordered.values[:, 1].isfinite(), -1)


def _key(context: RowContext) -> Key | None:
    params = context.seq.params
    return (params.seed, context.position) if params.temperature > 0 else None
