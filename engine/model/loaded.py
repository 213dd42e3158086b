"""LoadedModel: a model, and the facts discovered about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.interface import LayerShape
from engine.config import QuantizationName, Role
from engine.cpu.decoder import CompiledDecoder
from engine.model.call import Call


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model and the facts discovered about it. `folder` is where its files are, if local."""

    model: Any
    config: Any  # of transformers, or engine.model.llama.LlamaConfig
    path: str
    folder: Path | None
    role: Role
    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # columns of the logits
    max_model_len: int
    eos_ids: tuple[int, ...]
    layers: tuple[LayerShape, ...]
    logits: Call  # one forward: (input_ids, positions, keep, prepared) -> [kept, vocab]
    quantization: QuantizationName = "none"
    compiled: CompiledDecoder | None = None  # the same for a few rows, when it is at hand

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether a token's logits are promised to be the same in any company: to all digits that
        matter in float32, to the bit where compiled code runs every row."""
        return self.dtype == torch.float32 or (
            self.compiled is not None and self.compiled.takes_all_rows
        )

    @property
    def device_name(self) -> str:
        return str(self.device)
