"""LoadedModel: a model, the facts discovered about it, and its call: the model's own forward, or
faster code that passed the same check (`engine.model.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from engine.attention.interface import LayerShape, PreparedAttention
from engine.config import QuantizationName, Role
from engine.errors import ModelError
from engine.scheduling.segment import LAST

if TYPE_CHECKING:  # it loads numba, which CUDA graphs do not need
    from engine.cpu.decoder import CompiledDecoder

LayerHook = Callable[[int, Tensor], None]


class Call(Protocol):
    """One forward: logits `[kept, vocab]` for ids and positions `[1, rows]`. `keep`: the number of
    trailing rows to keep (at least 1), or which. `on_layer` is called with each layer's output `[1,
    rows, width]`, and with that of the final norm as layer LAST; valid only during the call."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: int | Tensor,
        prepared: PreparedAttention,
        on_layer: LayerHook | None = None,
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
    compiled: CompiledDecoder | None = None  # on a CPU, for few rows or all
    batch_invariant: bool = False  # by batch-invariant kernels on a GPU
    borrows: bool = False  # its weights belong to another model

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether a token's logits are the same in any batch, to the bit or to float32 accuracy."""
        return self.dtype == torch.float32 or self.has_batch_invariant_rows

    @property
    def has_batch_invariant_rows(self) -> bool:
        """Whether a token's logits are the same to the bit in any batch, since compiled code or
        batch-invariant kernels run every row."""
        everywhere = self.compiled is not None and self.compiled.takes_all_rows
        return everywhere or self.batch_invariant

    @property
    def device_name(self) -> str:
        return str(self.device)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A model's own forward, as a Call."""

    model: Any

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: int | Tensor,
        prepared: PreparedAttention,
        on_layer: LayerHook | None = None,
    ) -> Tensor:
        with watched(self.model, on_layer):
            output = self.model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=keep,
                foredraft=prepared,
            )
        logits: Tensor = output.logits[0]
        return logits


@contextmanager
def watched(model: Any, on_layer: LayerHook | None) -> Iterator[None]:
    """Call `on_layer` from forward hooks in the block. Raises ModelError as `name_of_layers`."""
    handles = []
    if on_layer is not None:
        layers = getattr(model.base_model, name_of_layers(model))
        numbered = [*enumerate(layers), (LAST, model.base_model)]
        calls = [(module, partial(_show, on_layer, at)) for at, module in numbered]
        handles = [module.register_forward_hook(call) for module, call in calls]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def name_of_layers(model: Any) -> str:
    """Return which attribute of the body has the decoder layers. Raises ModelError if none has."""
    for name, part in model.base_model.named_children():
        if isinstance(part, nn.ModuleList) and len(part) == model.config.num_hidden_layers:
            return str(name)
    what = "has no list of decoder layers, whose hidden states could be read or that could be cut"
    raise ModelError(f"a {type(model).__name__} {what} short")


def _show(on_layer: LayerHook, layer: int, _: nn.Module, __: Any, output: Any) -> None:
    on_layer(layer, output if isinstance(output, Tensor) else output[0])


def with_parts(module: Any, **parts: nn.Module) -> Any:
    """Return a copy of the module with these submodules replaced; all else is shared."""
    twin = copy(module)
    twin._modules = {**module._modules, **parts}
    return twin
