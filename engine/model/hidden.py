"""Hidden states that a forward returns with its logits, for proposers that need them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.interface import PreparedAttention
from engine.model.loaded import LayerHook, LoadedModel
from engine.scheduling.segment import HiddenRows


class HiddenCall:
    """A model's call that also stores the hidden states in `requested`: up to `most` rows in a
    tensor with a fixed address, as graphs need; more rows, which no graph has, in a new tensor."""

    def __init__(self, model: LoadedModel, requested: HiddenRows, most: int) -> None:
        self._call, self.requested = model.logits, requested
        self._place = {layer: at for at, layer in enumerate(requested.layers)}
        width = model.model.get_output_embeddings().weight.shape[1]
        dtype = torch.float32 if model.device.type == "cpu" else model.dtype
        shape = (most, len(requested.layers), width)
        self._fixed = torch.empty(shape, dtype=dtype, device=model.device)
        self._large = self._fixed

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: int | Tensor,
        prepared: PreparedAttention,
        on_layer: LayerHook | None = None,
    ) -> Tensor:
        every, place = self.requested.every, self._place
        kept = keep if isinstance(keep, int) else len(keep)
        out = self._of(input_ids.shape[1] if every else kept)

        def take(layer: int, rows: Tensor) -> None:
            if layer in place:
                found = rows[0]
                if not every:
                    found = found[-keep:] if isinstance(keep, int) else found.index_select(0, keep)
                out[:, place[layer]].copy_(found)

        return self._call(input_ids, positions, keep, prepared, take)

    def rows(self, count: int) -> Tensor:
        """Return the hidden states of the last call or replay, `[count, layers * width]`."""
        found = self._fixed if count <= len(self._fixed) else self._large
        self._large = self._fixed  # only the caller keeps a large tensor alive
        return found[:count].flatten(1)

    def _of(self, rows: int) -> Tensor:
        if rows <= len(self._fixed):
            return self._fixed[:rows]
        self._large = self._fixed.new_empty(rows, *self._fixed.shape[1:])
        return self._large
