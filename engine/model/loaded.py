"""LoadedModel: a model, the facts discovered about it, and how it is called: by its own forward, or
fused where that is the same. Small plain models are fused, see `engine.cpu.fused`. Which one is
decided once, by comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import LayerShape, PreparedAttention
from engine.config import QuantizationName, Role
from engine.cpu.decoder import CompiledDecoder
from engine.cpu.fused import fused_decoder

# (input_ids, positions `[1, rows]`, keep, prepared) -> logits `[kept, vocab]`. `keep` is how many
# trailing rows to keep (at least 1), or which.
Call = Callable[[Tensor, Tensor, int | Tensor, PreparedAttention], Tensor]

NEARLY = 1e-4  # of the largest logit: what sums in another order may differ by in float32


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
        """Whether a token's logits are promised to be the same in any batch: to all digits that
        matter in float32, to the bit where compiled code runs every row."""
        return self.dtype == torch.float32 or (
            self.compiled is not None and self.compiled.takes_all_rows
        )

    @property
    def device_name(self) -> str:
        return str(self.device)


def front_door(model: Any) -> Call:
    """The model's own forward."""

    def call(
        input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        output = model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            foredraft=prepared,
        )
        logits: Tensor = output.logits[0]
        return logits

    return call


@torch.inference_mode()
def choose_call(
    model: Any, prepared: Callable[[], PreparedAttention], tokens: list[int], *, fuse: bool = True
) -> Call:
    """The fused decoder where there is one that answers what the model does. `prepared` makes an
    attention for these tokens as one sequence from position 0. `fuse`: whether weights are plain
    tensors."""
    door = front_door(model)
    fused = fused_decoder(model) if fuse else None
    if fused is None:
        return door
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    for keep in (2, torch.tensor([0, len(tokens) - 1])):
        expected = door(ids, positions, keep, prepared())
        found = fused(ids, positions, keep, prepared())
        if not bool((found - expected).abs().max() <= NEARLY * expected.abs().max()):
            return door
    return fused
