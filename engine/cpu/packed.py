"""A large plain decoder (Llama and its like) whose few-row products are our own. CPU only.

A step of a large model is the reading of its weights. Torch reads float32 ones at their full size,
and on one thread reads bfloat16 ones at less than half of the speed that the memory has. Here
the weights are packed once more in the order in which they are read (so they are held twice: torch
keeps its own for forwards of many rows):

- a float32 model whose numbers are exact in bfloat16, as those of most published ones are, is read
  as bfloat16 and multiplied in float32 (`engine.cpu.kernels`): exact, and half the bytes;
- a bfloat16 model is multiplied by the instruction for it, where there is one
  (`engine.cpu.kernels_bfloat16`). All between the products is float32. These are the models that
  an operator asked to have in bfloat16 and that `engine.cpu.decoder` does not run: with heads
  of other sizes than its attention knows, or on two threads without tiles. `auto` makes float32 of
  both. Torch's own products would give a row other bits in other company.

The products run on one thread, so this is for engines with hardly more. What is chosen depends on
sizes alone, so that the last bits of a logit are the same after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import PreparedAttention
from engine.cpu import kernels, kernels_bfloat16, panels
from engine.cpu.decoder import angle_table
from engine.cpu.fused import LONGEST_TABLE, is_plain
from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_rows import add_and_normalise, gate_rows, normalise, rotate
from engine.cpu.vectors import multiplies_pairs

SMALLEST = 1 << 24  # parameters; fewer may stay in the processor's caches
MOST_THREADS = 2  # with more, torch's products read faster together than ours alone
MOST_ROWS = {torch.float32: 64, torch.bfloat16: 32}  # beyond, torch's large products are as fast
MOST_ROWS_OF_TILES = 128  # the same, against torch on one thread, in bfloat16

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Call = Callable[[Tensor, Tensor, int | Tensor, PreparedAttention], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    scaling: float
    norm: Floats
    query_key_value: Words
    output: Words
    mlp_norm: Floats
    gate_up: Words
    down: Words


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """Of one precision: how weights are packed and multiplied."""

    pack: Callable[[Tensor], Words]
    padded: Callable[[int], int]
    halves: bool  # rows are rounded to pairs first

    def product(self, rows: Floats, words: Words) -> Floats:
        """`rows` `[rows, in]` by the packed `[in, out]`: float32 `[rows, padded(out)]`."""
        out = np.empty((len(rows), self.padded(1) * len(words)), dtype=np.float32)
        if self.halves:
            space = np.empty((len(rows), rows.shape[1] // 2), dtype=np.uint32)
            kernels_bfloat16.product(rows, space, words, out)
        else:
            kernels.product(rows, words, out)
        return out


_EXACT = _Arithmetic(panels.pack, panels.padded, halves=False)
_ROUNDED = _Arithmetic(kernels_bfloat16.pack, kernels_bfloat16.padded, halves=True)


class PackedDecoder:
    """Callable as `engine.model.call.Call`; `plain` answers forwards of more rows."""

    def __init__(self, model: Any, plain: Call) -> None:
        body, config = model.base_model, model.config
        head = model.get_output_embeddings().weight
        self._plain = plain
        self._dtype: torch.dtype = head.dtype
        self._most_rows = _most_rows(self._dtype)
        self._arithmetic = _ROUNDED if self._dtype == torch.bfloat16 else _EXACT
        self._embed = body.embed_tokens
        self._layers = [self._pack(layer) for layer in body.layers]
        self._norm = _floats(body.norm.weight)
        self._head = self._arithmetic.pack(head)
        self._vocab = int(head.shape[0])
        self._epsilon = np.float32(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._inner = int(config.intermediate_size)
        self._cosine, self._sine = angle_table(body.rotary_emb, config.max_position_embeddings)

    def _pack(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp

        def joined(*modules: Any) -> Words:
            return self._arithmetic.pack(torch.cat([module.weight.detach() for module in modules]))

        return _Layer(
            index=attention.layer_idx,
            scaling=attention.scaling,
            norm=_floats(layer.input_layernorm.weight),
            query_key_value=joined(attention.q_proj, attention.k_proj, attention.v_proj),
            output=joined(attention.o_proj),
            mlp_norm=_floats(layer.post_attention_layernorm.weight),
            gate_up=joined(mlp.gate_proj, mlp.up_proj),
            down=joined(mlp.down_proj),
        )

    def __call__(
        self, input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        if input_ids.shape[1] > self._most_rows:
            return self._plain(input_ids, positions, keep, prepared)
        hidden: Floats = self._embed(input_ids[0]).float().numpy()
        at = positions[0].numpy()
        normed = np.empty_like(hidden)
        added: Floats | None = None
        for layer in self._layers:
            self._add(added, hidden, layer.norm, normed)
            added = self._attend(layer, normed, at, prepared)
            self._add(added, hidden, layer.mlp_norm, normed)
            added = self._mlp(layer, normed)
        self._add(added, hidden, self._norm, normed)
        rows = normed[-keep:] if isinstance(keep, int) else normed[keep.numpy()]
        logits = self._arithmetic.product(rows, self._head)
        return torch.from_numpy(logits)[:, : self._vocab]

    def _add(self, added: Floats | None, hidden: Floats, norm: Floats, normed: Floats) -> None:
        """What a product left joins the residual stream, which is then normalised."""
        if added is None:
            normalise(hidden, norm, self._epsilon, normed)
        else:
            add_and_normalise(added.T, hidden, norm, self._epsilon, normed)

    def _attend(
        self, layer: _Layer, normed: Floats, at: Any, prepared: PreparedAttention
    ) -> Floats:
        rows, dim = len(normed), self._cosine.shape[1]
        packed = self._arithmetic.product(normed, layer.query_key_value)
        query = np.empty((self._heads, rows, dim), dtype=np.float32)
        key = np.empty((self._kv_heads, rows, dim), dtype=np.float32)
        value = np.empty_like(key)
        rotate(packed.T, self._cosine, self._sine, at, query, key, value)
        parts = (torch.from_numpy(part)[None] for part in (query, key, value))
        attended = prepared.attend(  # float32; whoever multiplies pairs or keeps them rounds
            layer.index, *parts,
            scaling=layer.scaling, window=None, softcap=None, sinks=None,
        )  # fmt: skip
        flat = attended[0].reshape(rows, -1).contiguous().numpy()
        return self._arithmetic.product(flat, layer.output)

    def _mlp(self, layer: _Layer, normed: Floats) -> Floats:
        wide = self._arithmetic.product(normed, layer.gate_up)
        inner = np.empty((len(normed), self._inner), dtype=np.float32)
        gate_rows(wide, inner)
        return self._arithmetic.product(inner, layer.down)


def packed_decoder(model: Any, plain: Call, *, smallest: int = SMALLEST) -> PackedDecoder | None:
    """None where it is not known to be right, or not faster; models below `smallest` are not."""
    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    if sum(p.numel() for p in parameters) < smallest or torch.get_num_threads() > MOST_THREADS:
        return None
    config = model.config
    if dtype not in MOST_ROWS or not is_plain(model, dtype):
        return None
    if config.max_position_embeddings > LONGEST_TABLE:
        return None
    if dtype == torch.bfloat16 and not (multiplies_pairs() and _is_even(model)):
        return None
    if dtype == torch.float32 and not all(panels.is_exact(p) for p in parameters):
        return None
    return PackedDecoder(model, plain)


def _most_rows(dtype: torch.dtype) -> int:
    """Of a forward that is not torch's."""
    tiles = dtype == torch.bfloat16 and HAS_TILES and torch.get_num_threads() == 1
    return MOST_ROWS_OF_TILES if tiles else MOST_ROWS[dtype]


def _is_even(model: Any) -> bool:
    """Whether the inputs of all products come in pairs."""
    return all(p.shape[1] % 2 == 0 for p in model.parameters() if p.dim() == 2)


def _floats(weight: Tensor) -> Floats:
    array: Floats = weight.detach().float().contiguous().numpy()
    return array
