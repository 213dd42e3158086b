"""LoadedModel: a model, the facts discovered about it, and how it is called: by its own forward, or
by quicker code that was proven to do the same (`engine.model.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.attention.interface import LayerShape, PreparedAttention
from engine.config import QuantizationName, Role
from engine.cpu.decoder import CompiledDecoder
from engine.errors import ModelError
from engine.scheduling.segment import LAST

See = Callable[[int, Tensor], None]


class Call(Protocol):
    """One forward: logits `[kept, vocab]` of ids and positions `[1, rows]`. `keep` is how many
    trailing rows to keep (at least 1), or which. `see` is shown the rows `[1, rows, width]` behind
    each layer, and as LAST those behind the last norm; they stand no longer than the call."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: int | Tensor,
        prepared: PreparedAttention,
        see: See | None = None,
    ) -> Tensor: ...


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
    logits: Call
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
        matter in float32, or to the bit."""
        return self.dtype == torch.float32 or self.has_steady_rows

    @property
    def has_steady_rows(self) -> bool:
        """Whether they are the same to the bit: compiled code or kernels of ours run every row."""
        everywhere = self.compiled is not None and self.compiled.takes_all_rows
        return everywhere or self.batch_invariant

    @property
    def device_name(self) -> str:
        return str(self.device)


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """A model's own forward, as a Call."""

    model: Any

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: int | Tensor,
        prepared: PreparedAttention,
        see: See | None = None,
    ) -> Tensor:
        with watched(self.model, see):
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


@contextmanager
def watched(model: Any, see: See | None) -> Iterator[None]:
    """By hooks that are there for this call alone. Raises ModelError."""
    handles = []
    if see is not None:
        places = [*enumerate(layers_of(model)), (LAST, model.base_model)]
        handles = [module.register_forward_hook(partial(_show, see, at)) for at, module in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers, whatever a family calls them. Raises ModelError."""
    for part in model.base_model.children():
        if isinstance(part, nn.ModuleList) and len(part) == model.config.num_hidden_layers:
            return part
    kind = type(model).__name__
    raise ModelError(f"{kind} keeps its layers in no list: their hidden states cannot be had")


def _show(see: See, layer: int, _: nn.Module, __: Any, output: Any) -> None:
    see(layer, output if isinstance(output, Tensor) else output[0])


def with_parts(module: Any, **parts: nn.Module) -> Any:
    """The module with other parts; it shares all else with the one that was given."""
    twin = copy(module)
    twin._modules = {**module._modules, **parts}
    return twin
