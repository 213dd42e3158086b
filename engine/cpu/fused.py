"""Run a plain Llama-shaped decoder on a CPU layer by layer, with fewer and larger operations.

A small model's forward is dominated by overhead between operations, so query, key and value are one
product, gate and up another, and everything between products is compiled. A forward of few rows is
bound by reading weights: where `packed_decoder` allows, a packed copy of half the size is kept and
multiplied by our own code, whose result for a row does not depend on the other rows.

The loader compares the decoder's results with the model's, and the proof at load runs the chosen
decoder. The choice depends on sizes alone, so a restart gives bit-identical results.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.attention.interface import PreparedAttention, Variation
from engine.cpu import kernels_rows
from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_products import product
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.cpu.weights import Floats, array_of, has_even_inputs, is_exact, pack, padded
from engine.scheduling.segment import LAST

FAMILIES = frozenset({"llama", "mistral"})
LONGEST_TABLE = 1 << 15  # positions in the table of rotary angles; longer contexts compute them
# The least positions in a table: the proof at load and the profile at start run more positions than
# some engines serve, and compiled code checks no bounds (tests/model/test_profile.py).
SHORTEST_TABLE = 128
COLUMN_ROWS = 7  # with up to this many rows, torch is faster with (W x')'
MOST_THREADS = 2  # with more, torch's parallel products are faster than ours on one thread
# Rows of a packed product; beyond, torch is as fast.
MOST_PACKED_ROWS = {torch.float32: 64, torch.bfloat16: 32}
MOST_ROWS_OF_TILES = 128  # the same limit on one thread with AMX


class PackedWeight:
    """A weight matrix `[out, in]`. Our code multiplies up to `most_packed` rows, torch more."""

    def __init__(self, weight: Tensor, most_packed: int) -> None:
        self._weight = weight
        self._most_packed = most_packed
        self._words = pack(weight) if most_packed else None
        self.packed_bytes = 0 if self._words is None else self._words.nbytes

    def __call__(self, rows: Floats) -> Floats:
        """Map float32 `[rows, in]` to float32 `[rows, out or more]`."""
        weight = self._weight
        if self._words is not None and len(rows) <= self._most_packed:
            found = np.empty((len(rows), padded(len(weight))), np.float32)
            product(rows, self._words, weight.dtype == torch.bfloat16, found)
            return found
        if weight.dtype != torch.float32 or len(rows) > COLUMN_ROWS:
            given = torch.from_numpy(rows).to(weight.dtype)
            return linear(given, weight).float().numpy()
        # A product with two columns is faster than a matrix-vector product.
        columns = rows if len(rows) != 1 else np.repeat(rows, 2, axis=0)
        found = np.empty((len(weight), len(columns)), np.float32)
        torch.mm(weight, torch.from_numpy(columns).t(), out=torch.from_numpy(found))
        return np.ascontiguousarray(found[:, : len(rows)].T)


def packed_product(weight: Tensor) -> PackedWeight | None:
    """Return `weight` as a product that uses our code for few rows, or None where torch is as fast:
    on many threads, off the CPU, or not in bfloat16."""
    few = torch.get_num_threads() <= MOST_THREADS and weight.device.type == "cpu"
    fits = weight.dtype == torch.bfloat16 and MULTIPLIES_PAIRS and weight.shape[1] % 2 == 0
    return PackedWeight(weight, _most_packed_rows(weight.dtype)) if few and fits else None


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    scaling: float
    norm: Floats
    query_key_value: PackedWeight
    output: PackedWeight
    mlp_norm: Floats
    gate_up: PackedWeight
    down: PackedWeight


class FusedDecoder:
    """An `engine.model.loaded.Call`. The model's own parameters become views of the joined weights.
    `packed`: also keep packed weights, for forwards of few rows."""

    def __init__(self, model: Any, *, packed: bool = False) -> None:
        body, config = model.base_model, model.config
        head = model.get_output_embeddings().weight
        self._most_packed = _most_packed_rows(head.dtype) if packed else 0
        self._embed = body.embed_tokens
        self._layers = [self._layer(layer) for layer in body.layers]
        self._norm = array_of(body.norm.weight)
        self._head = PackedWeight(head, self._most_packed)
        self._vocab, self._inner = int(head.shape[0]), int(config.intermediate_size)
        self._epsilon = np.float32(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._rotary = body.rotary_emb
        length = config.max_position_embeddings
        self._table = angle_table(self._rotary, length) if length <= LONGEST_TABLE else None

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp, most = layer.self_attn, layer.mlp, self._most_packed
        qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        return _Layer(
            index=attention.layer_idx,
            scaling=attention.scaling,
            norm=array_of(layer.input_layernorm.weight),
            query_key_value=PackedWeight(qkv, most),
            output=PackedWeight(attention.o_proj.weight, most),
            mlp_norm=array_of(layer.post_attention_layernorm.weight),
            gate_up=PackedWeight(joined(mlp.gate_proj, mlp.up_proj), most),
            down=PackedWeight(mlp.down_proj.weight, most),
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, 0 without any."""
        each = [(s.query_key_value, s.output, s.gate_up, s.down) for s in self._layers]
        weights = [self._head, *(weight for layer in each for weight in layer)]
        return sum(weight.packed_bytes for weight in weights)

    def first(self, layers: int) -> FusedDecoder:
        """Return a decoder of the first `layers` layers, norm and head, sharing all weights."""
        twin = copy(self)
        twin._layers = self._layers[:layers]
        return twin

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        keep: int | Tensor,
        prepared: PreparedAttention,
        on_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        hidden: Floats = self._embed(input_ids[0]).float().numpy()
        at = positions[0].numpy()
        angles = self._table
        if angles is None:
            angles, at = _angles(self._rotary, positions[0]), np.arange(len(at))
        normed = np.empty_like(hidden)
        for layer in self._layers:
            kernels_rows.normalise(hidden, layer.norm, self._epsilon, normed)
            kernels_rows.add(self._attend(layer, normed, angles, at, prepared), hidden)
            kernels_rows.normalise(hidden, layer.mlp_norm, self._epsilon, normed)
            inner = np.empty((len(hidden), self._inner), np.float32)
            kernels_rows.gate(layer.gate_up(normed), inner)
            kernels_rows.add(layer.down(inner), hidden)
            if on_layer is not None:
                on_layer(layer.index, torch.from_numpy(hidden)[None])
        if on_layer is not None:
            kernels_rows.normalise(hidden, self._norm, self._epsilon, normed)
            on_layer(LAST, torch.from_numpy(normed)[None])
        kept = hidden[-keep:] if isinstance(keep, int) else hidden[keep.numpy()]
        normed = normed[: len(kept)]
        kernels_rows.normalise(kept, self._norm, self._epsilon, normed)
        return torch.from_numpy(self._head(normed))[:, : self._vocab]

    def _attend(
        self,
        layer: _Layer,
        normed: Floats,
        angles: tuple[Floats, Floats],
        at: Any,
        prepared: PreparedAttention,
    ) -> Floats:
        rotated, count = self._heads + self._kv_heads, len(normed)
        packed = layer.query_key_value(normed)
        kernels_rows.rotate(packed, *angles, at, rotated)
        columns = (rotated + self._kv_heads) * angles[0].shape[1]
        heads = torch.from_numpy(packed)[:, :columns].view(len(normed), -1, angles[0].shape[1])
        query, key, value = heads.transpose(0, 1)[None].split(  # type: ignore[no-untyped-call]
            [self._heads, self._kv_heads, self._kv_heads], dim=1
        )
        how = Variation(layer.scaling)
        attended = prepared.run(layer.index, query, key, value, how)  # float32; may round inside
        return layer.output(attended.reshape(count, -1).contiguous().numpy())


def fused_decoder(model: Any) -> FusedDecoder | None:
    """Return a FusedDecoder, or None if the model is not known to be plain and float32."""
    return FusedDecoder(model) if is_plain(model, torch.float32) else None


def packed_decoder(model: Any) -> FusedDecoder | None:
    """Return a FusedDecoder with packed weights, or None where it is not known to be right or
    faster. It gets the bfloat16 models that `engine.cpu.decoder` does not run."""
    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    if torch.get_num_threads() > MOST_THREADS:
        return None
    if dtype not in MOST_PACKED_ROWS or not is_plain(model, dtype):
        return None
    if model.config.max_position_embeddings > LONGEST_TABLE or not has_even_inputs(model.config):
        return None
    if not (MULTIPLIES_PAIRS if dtype == torch.bfloat16 else all(map(is_exact, parameters))):
        return None
    return FusedDecoder(model, packed=True)


def _most_packed_rows(dtype: torch.dtype) -> int:
    tiles = dtype == torch.bfloat16 and HAS_TILES and torch.get_num_threads() == 1
    return MOST_ROWS_OF_TILES if tiles else MOST_PACKED_ROWS[dtype]


def is_plain(model: Any, dtype: torch.dtype) -> bool:
    """Whether a model is on the CPU in this dtype and known to be Llama-shaped: SiLU activation, no
    biases, no sliding window."""
    config, weight = model.config, model.get_output_embeddings().weight
    return (
        config.model_type in FAMILIES
        and weight.device.type == "cpu"
        and weight.dtype == dtype
        and getattr(config, "hidden_act", None) == "silu"
        and getattr(config, "sliding_window", None) is None
        and not any(isinstance(m, nn.Linear) and m.bias is not None for m in model.modules())
    )


def angle_table(rotary: Any, count: int) -> tuple[Floats, Floats]:
    """Return the angles of at least `count` positions, in the form `kernels_rows.rotate` takes."""
    return _angles(rotary, torch.arange(max(count, SHORTEST_TABLE)))


@torch.inference_mode()
def _angles(rotary: Any, positions: Tensor) -> tuple[Floats, Floats]:
    """Return cosine and signed sine (first half negated), float32 `[positions, dim]`."""
    cosine, sine = rotary(torch.zeros(1), position_ids=positions[None])
    half = sine.shape[-1] // 2
    signed = torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)
    return cosine[0].contiguous().numpy(), signed[0].contiguous().numpy()


def joined(*modules: Any, name: str = "weight") -> Tensor:
    """Return the modules' weights `[out, in]`, or biases, concatenated; each module gets a view."""
    joined = torch.cat([getattr(module, name).detach() for module in modules])
    first = 0
    for module in modules:
        last = first + len(getattr(module, name))
        setattr(module, name, nn.Parameter(joined[first:last], requires_grad=False))
        first = last
    return joined
