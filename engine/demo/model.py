"""The pair's two Llamas: their shapes, how the target grows, their folders."""

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
    """One of the pair: see `learning.llama`."""
    return learning.llama(
        width, inner, layers, vocabulary=VOCABULARY, max_position_embeddings=CONTEXT,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


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
