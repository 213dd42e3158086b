"""The pair's two Llamas: their shapes, how the target grows, what trains them, their folders."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from engine.demo.tokens import CONTEXT, VOCABULARY
from engine.errors import ConfigError

HEAD_SIZE = 64


def llama(width: int, inner: int, layers: int) -> Any:
    """A LlamaForCausalLM in float32, zero where a layer writes into the residual stream: each layer
    starts as the identity."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif weight.ndim == 2 and "embed" not in name:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


@torch.no_grad()
def grow(model: Any, layers: int) -> None:
    """Deepen the model, to a multiple of its layers, without a change of what it computes.

    Each new layer goes behind an old one, as its copy, with its two output projections at zero.
    """
    times = layers // model.config.num_hidden_layers
    stack = [copy.deepcopy(layer) for layer in model.model.layers for _ in range(times)]
    for index, layer in enumerate(stack):
        layer.self_attn.layer_idx = index
        if index % times:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.model.layers = nn.ModuleList(stack)
    model.config.num_hidden_layers = layers


class Optimizer:
    """Muon for the matrices inside layers, AdamW for embeddings and norms; one schedule."""

    def __init__(self, *models: Any, scale: float = 1.0) -> None:
        named = [pair for model in models for pair in model.named_parameters()]
        inner = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        other = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self._parts: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (torch.optim.Muon(inner, weight_decay=0.01, ns_steps=4), 0.02 * scale),
            (torch.optim.AdamW(other, betas=(0.9, 0.95), weight_decay=0.0), 0.003 * scale),
        )

    def step(self, rate: float) -> None:
        """One update at this share, 0 to 1, of the full learning rates."""
        for optimizer, full in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad()


def logits(model: Any, ids: Tensor) -> Tensor:
    """`[rows, length]` token ids -> `[rows * length, vocabulary]`, float32."""
    found: Tensor = model(ids, use_cache=False).logits
    return found.flatten(0, 1).float()


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """KL divergence of the draft's distribution from the target's, mean over positions; of two
    sets of logits `[positions, vocabulary]`."""
    wanted, offered = target.log_softmax(-1), draft.log_softmax(-1)
    return F.kl_div(offered, wanted, reduction="batchmean", log_target=True)


def save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer, under a new name until all is written:
    others may be reading the folder while training goes on."""
    model = copy.deepcopy(model).bfloat16()
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=ends, pad_token_id=0
    )
    fresh, old = (folder.with_name(folder.name + end) for end in (".new", ".old"))
    for path in (fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The LlamaForCausalLM of a folder."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def check(folder: Path) -> None:
    """Raises ConfigError unless the folder holds a pair."""
    for path in (folder / "target", folder / "draft"):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{folder} holds no pair: there is no {path / 'config.json'}")
