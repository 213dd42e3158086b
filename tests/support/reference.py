"""The plain reference: one token at a time, whole context each time, no cache, no batch.

Shares no code with the engine. Logits come from transformers' own eager forward; every sampling
field and the keyed noise are reimplemented here from their definitions, slowly, in numpy float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from engine.messages import SamplingParams
from tests.support.reference_noise import gumbel

Floats = npt.NDArray[np.float64]


class Reference:
    """A model; `generate` returns the token ids and the raw log-probability of each."""

    def __init__(self, path: str, eos_ids: Sequence[int]) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = model.eval()
        self._eos_ids = list(eos_ids)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Raw logits of every position, `[len(tokens), vocab]`."""
        with torch.inference_mode():
            out = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return np.asarray(out.numpy(), dtype=np.float64)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], list[float]]:
        tokens, output, logprobs = list(prompt), list[int](), list[float]()
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_ids))
        while len(output) < params.max_tokens:
            raw = self.logits(tokens)[-1]
            token = self.draw(raw, params, prompt, output)
            tokens.append(token)
            output.append(token)
            logprobs.append(float(log_softmax(raw)[token]))
            if token in stops:
                break
        return output, logprobs

    def draw(
        self, raw: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> int:
        scores = penalised(raw, params, prompt, output)
        if len(output) < params.min_tokens:
            scores[list({*self._eos_ids, *params.stop_token_ids})] = -np.inf
        if params.temperature == 0:
            return int(np.argmax(scores))
        log_probs = filtered(log_softmax(scores / params.temperature), params)
        noise = gumbel(params.seed, len(prompt) + len(output), len(raw))
        return int(np.argmax(log_probs + noise))


def log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float64)


def penalised(
    raw: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Apply logit_bias, then repetition (prompt and output), frequency and presence (output)."""
    scores = raw.copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def filtered(log_probs: Floats, params: SamplingParams) -> Floats:
    """Apply top_k, then top_p (smallest set that reaches it), then min_p (relative to the best)."""
    order = np.lexsort((np.arange(len(log_probs)), -log_probs))
    keep = np.ones(len(log_probs), dtype=bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    probs = np.where(keep, np.exp(log_probs), 0.0)
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[before >= params.top_p]] = False
    keep &= probs >= params.min_p * probs.max()
    return np.where(keep, log_probs, -np.inf)
