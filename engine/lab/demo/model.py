"""The pair's two Llama models: creates, deepens, saves and loads them."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from engine.demo.tokens import CONTEXT, VOCABULARY
from engine.errors import ConfigError
from engine.lab.train import learning


def llama(width: int, inner: int, layers: int) -> Any:
    """Return a new model with the pair's vocabulary and context; see `learning.llama`."""
    return learning.llama(
        width, inner, layers, vocabulary=VOCABULARY, max_position_embeddings=CONTEXT,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


@torch.no_grad()
def grow(model: Any, layers: int) -> None:
    """Deepen the model to `layers`, a multiple of its present number, without changing its output.

    Each new layer follows an old one and is a copy of it with its two output projections zeroed.
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


def save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save bfloat16 weights, configuration and tokenizer. Everything is written under another name
    and then renamed, since other processes may read the folder during training."""
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
    """Return the LlamaForCausalLM of a folder, in evaluation mode."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def check(folder: Path) -> None:
    """Raise ConfigError unless the folder contains a target and a draft."""
    for path in (folder / "target", folder / "draft"):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{folder} contains no pair: {path / 'config.json'} is missing")
