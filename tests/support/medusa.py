"""A slow reference of Medusa (arXiv:2401.10774): heads for a target, and greedy decoding with them.
Shares no code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]  # by the names of published checkpoints


def random_heads(vocabulary: Tensor, *, heads: int = 3, blocks: int = 1) -> Weights:
    """Return heads close to the target's LM head, so that some proposals are right."""
    generator = torch.Generator().manual_seed(5)
    vocab, width = vocabulary.shape
    found: Weights = {}
    for head in range(heads):
        for block in range(blocks):
            mix = torch.randn(width, width, generator=generator) * 0.3 / width**0.5
            found[f"{head}.{block}.linear.weight"] = mix
            found[f"{head}.{block}.linear.bias"] = torch.randn(width, generator=generator) * 0.1
        noise = torch.randn(vocab, width, generator=generator) * 0.05
        found[f"{head}.{blocks}.weight"] = vocabulary.detach().float() + noise
    return found


def save(weights: Weights, folder: Path, **config: Any) -> str:
    """Save in the published format; return the folder as a string."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "medusa_lm_head.safetensors")
    defaults = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(defaults | config))
    return str(folder)


def read(folder: str) -> Weights:
    return load_file(Path(folder) / "medusa_lm_head.safetensors")


def logits_of(weights: Weights, head: int, hidden: Tensor) -> Tensor:
    """`[width]` -> `[vocab]`."""
    block = 0
    while f"{head}.{block}.linear.weight" in weights:
        inner = weights[f"{head}.{block}.linear.weight"] @ hidden
        inner = inner + weights[f"{head}.{block}.linear.bias"]
        hidden = hidden + inner * torch.sigmoid(inner)
        block += 1
    return weights[f"{head}.{block}.weight"] @ hidden


def greedy(
    model: Any, weights: Weights, prompt: Sequence[int], length: int,
    choices: Sequence[tuple[int, ...]],
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of each step after prefill, by the paper's greedy decoding: every path of
    `choices` is a candidate, and the longest one that the target agrees with is kept, plus the
    target's next token. The target runs every candidate alone, without a cache."""
    tokens, steps = list(prompt), list[list[int]]()
    hidden, first = _last(model, tokens, 0)
    tokens += first
    while len(tokens) - len(prompt) < length:
        ranked = [
            logits_of(weights, head, hidden).argsort(descending=True, stable=True).tolist()
            for head in range(max(map(len, choices)))
        ]
        best: list[int] = []
        for path in choices:
            proposed = [ranked[head][rank] for head, rank in enumerate(path)]
            _, next_tokens = _last(model, tokens + proposed, len(proposed))
            if len(proposed) > len(best) and next_tokens[:-1] == proposed:
                best = proposed
        hidden, next_tokens = _last(model, tokens + best, 0)
        steps.append(best + next_tokens)
        tokens += steps[-1]
    return steps


@torch.inference_mode()
def _last(model: Any, tokens: Sequence[int], before: int) -> tuple[Tensor, list[int]]:
    """Return the LM head's input at the last position, and the likeliest next tokens after each of
    the last `before` + 1 positions."""
    states: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: states.append(given[0][0, -1])
    )
    try:
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1 - before :]
    finally:
        handle.remove()
    return states[0].float(), logits.argmax(dim=-1).tolist()


CHOICES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1),
)  # fmt: skip
