"""LoadedModel: a model, the facts discovered about it, and how it is called: by its own forward, or
by quicker code that was proven to do the same (`engine.model.loader`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.interface import LayerShape, PreparedAttention
from engine.config import QuantizationName, Role
from engine.cpu.decoder import CompiledDecoder

# (input_ids, positions `[1, rows]`, keep, prepared) -> logits `[kept, vocab]`. `keep` is how many
# trailing rows to keep (at least 1), or which.
Call = Callable[[Tensor, Tensor, int | Tensor, PreparedAttention], Tensor]


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
    batch_invariant: bool = False  # by kernels for that, on a GPU
    borrows: bool = False  # its weights are another model's

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether a token's logits are promised to be the same in any batch: to all digits that
        matter in float32, to the bit where compiled code or kernels of ours run every row."""
        everywhere = self.compiled is not None and self.compiled.takes_all_rows
        return self.dtype == torch.float32 or everywhere or self.batch_invariant

    @property
    def device_name(self) -> str:
        return str(self.device)


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """A model's own forward, as a Call."""

    model: Any

    def __call__(
        self, input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            foredraft=prepared,
        )
        logits: Tensor = output.logits[0]
        return logits


def front_door(model: Any) -> FrontDoor:
    return FrontDoor(model)


def with_parts(module: Any, **parts: nn.Module) -> Any:
    """The module with other parts; it shares all else with the one that was given."""
    twin = copy(module)
    twin._modules = {**module._modules, **parts}
    return twin
