"""Writes a model's folder as transformers expects it, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from engine.demo.network import Network, Shape
from engine.errors import ConfigError


def save(network: Network, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights in bfloat16, configuration and tokenizer, under a new name until all is written.

    Others may be reading the folder while training goes on.
    """
    model: Any = LlamaForCausalLM(LlamaConfig(**network.shape.config()))
    model.load_state_dict(network.state_dict(), strict=False)
    model.bfloat16()
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")]
    model.generation_config = settings(eos_token_id=ends)
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for path in fresh.iterdir():
        path.chmod(0o644)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check(folder: Path) -> None:
    """Raises ConfigError unless the folder holds a pair."""
    for path in (folder / "target", folder / "draft"):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{folder} holds no pair: there is no {path / 'config.json'}")


def settings(**values: Any) -> GenerationConfig:
    """How to generate; what is not said here must not come from the model's folder."""
    return GenerationConfig(pad_token_id=0, **values)  # type: ignore[no-untyped-call]


def plain(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers runs it."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Network:
    """The training network with the folder's weights."""
    model = plain(folder, torch.float32)
    config = model.config
    shape = Shape(
        config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers
    )
    network = Network(shape, dtype)
    weights = {
        name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"
    }
    network.load_state_dict(weights)
    return network
