"""The plainest decoders (Llama and its like) with fewer, larger operations. CPU and float32 only.

A small model's forward is the time between its operations, not in them: at 16 layers of width 192,
more than half of a decode was dispatch. Here query, key and value are one product, gate and up
another, the rotation acts on query and key at once and takes its angles from a table, and rows
stay `[rows, hidden]`. The parameters of the model become views of the packed ones, so nothing but
a small output embedding is held twice.

Models too small for `(W x')'` (see `engine.cpu.layers`) are drafts: between two of their forwards
a larger target has swept the caches. `x W'` with W' laid out by rows reads it in order then: an
output embedding of 4096 x 256 took 0.11 to 0.15 ms so, 0.39 to 0.45 ms as `linear`, one thread.
Whether it computes what the model computes is not assumed: `choose_call` compares, and the proof at
load runs on what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from engine.attention.interface import PreparedAttention
from engine.cpu.few_rows import FewRows, Shape
from engine.cpu.layers import FLIPPED_ROWS, flipped_product

LARGEST_TURNED_HEAD = 1 << 26  # bytes; heads up to here are also held as [in, out]
FAMILIES = frozenset({"llama", "mistral"})
LONGEST_TABLE = 1 << 15  # positions whose angles are kept; longer contexts compute them
# and what a table has at least: the proof at load and the profile at start run more positions than
# some engines serve, and compiled code checks no bounds (tests/model/test_profile.py)
SHORTEST_TABLE = 128


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, `[out, in]`, or `[in, out]` when the decoder is `turned`."""

    index: int
    scaling: float
    norm: Tensor
    query_key_value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FusedDecoder:
    """Callable as `engine.model.call.Call`. `turned` lays weights out as `[in, out]`."""

    def __init__(self, model: Any, *, turned: bool) -> None:
        body, config = model.base_model, model.config
        self._embed = body.embed_tokens
        self._turned = turned
        self._layers = [_pack(layer, _turned if turned else _joined) for layer in body.layers]
        self._norm: Tensor = body.norm.weight
        head: Tensor = model.get_output_embeddings().weight
        self._head = head
        self._turned_head = head.t().contiguous() if head.nbytes <= LARGEST_TURNED_HEAD else None
        self._epsilon = float(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._width = (int(self._norm.shape[0]),)
        self._rotary = body.rotary_emb
        self._table = self._angles(config.max_position_embeddings)
        shape = Shape(self._width[0], self._heads, self._kv_heads, self._epsilon)
        self._few = (
            FewRows(self._layers, shape, self._table) if self._table and not turned else None
        )

    def _angles(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Cosine and signed sine `[length or more, dim]` of every position."""
        if length > LONGEST_TABLE:
            return None
        every = torch.arange(max(length, SHORTEST_TABLE))
        return signed_angles(self._rotary, every, like=self._norm)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        rows = self._embed(input_ids[0])
        if self._few is not None and len(rows) <= FLIPPED_ROWS:
            return self._logits(self._few.run(rows, positions[0], prepared), keep)
        if self._table is None:
            cosine, sine = signed_angles(self._rotary, positions[0], like=self._norm)
        else:
            cosine, sine = (angles.index_select(0, positions[0]) for angles in self._table)
        angles = cosine[:, None], sine[:, None]
        for layer in self._layers:
            rows = rows + self._attend(layer, rows, angles, prepared)
            rows = rows + self._mlp(layer, rows)
        return self._logits(rows, keep)

    def _logits(self, rows: Tensor, keep: int | Tensor) -> Tensor:
        kept = rows[-keep:] if isinstance(keep, int) else rows.index_select(0, keep)
        normed = torch.rms_norm(kept, self._width, self._norm, self._epsilon)
        if self._turned_head is None:
            return linear(normed, self._head)
        return torch.mm(normed, self._turned_head)

    def _attend(
        self,
        layer: _Layer,
        rows: Tensor,
        angles: tuple[Tensor, Tensor],
        prepared: PreparedAttention,
    ) -> Tensor:
        normed = torch.rms_norm(rows, self._width, layer.norm, self._epsilon)
        packed = self._product(normed, layer.query_key_value)
        count, rotated = len(rows), self._heads + self._kv_heads
        heads = packed.view(count, rotated + self._kv_heads, -1)
        turned = _rotated(heads[:, :rotated], *angles).transpose(0, 1)[None]
        attended = prepared.attend(
            layer.index,
            turned[:, : self._heads],
            turned[:, self._heads :],
            heads[:, rotated:].transpose(0, 1)[None],
            scaling=layer.scaling,
            window=None,
            softcap=None,
            sinks=None,
        )
        return self._product(attended.reshape(count, -1), layer.output)

    def _mlp(self, layer: _Layer, rows: Tensor) -> Tensor:
        normed = torch.rms_norm(rows, self._width, layer.mlp_norm, self._epsilon)
        gate, up = self._product(normed, layer.gate_up).chunk(2, dim=-1)
        return self._product(silu(gate).mul_(up), layer.down)

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self._turned:
            return torch.mm(rows, weight)
        if rows.shape[0] <= FLIPPED_ROWS:  # only where angles are not kept
            return flipped_product(rows, weight)
        return linear(rows, weight)


def fused_decoder(model: Any) -> FusedDecoder | None:
    """None for what is not known to be plain: another family, device or dtype, biases, a sliding
    window, another activation. Packs the weights."""
    if not is_plain(model):
        return None
    return FusedDecoder(model, turned=not _is_flipped(model))


def is_plain(model: Any, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a model is known to be Llama-shaped, and lies on the CPU in this dtype."""
    config, weight = model.config, model.get_output_embeddings().weight
    return (
        config.model_type in FAMILIES
        and weight.device.type == "cpu"
        and weight.dtype == dtype
        and getattr(config, "hidden_act", None) == "silu"
        and getattr(config, "sliding_window", None) is None
        and not any(isinstance(m, nn.Linear) and m.bias is not None for m in model.modules())
    )


def _is_flipped(model: Any) -> bool:
    """Whether `exchange_layers` judged this model's products cheaper from the left."""
    return type(model.base_model.layers[0].mlp.down_proj) is not nn.Linear


def _pack(layer: Any, join: Callable[..., Tensor]) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        index=attention.layer_idx,
        scaling=attention.scaling,
        norm=layer.input_layernorm.weight,
        query_key_value=join(attention.q_proj, attention.k_proj, attention.v_proj),
        output=join(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=join(mlp.gate_proj, mlp.up_proj),
        down=join(mlp.down_proj),
    )


def _joined(*modules: Any) -> Tensor:
    """Their weights one below the other, `[out, in]`; each module keeps a view of its own."""
    joined = torch.cat([module.weight.detach() for module in modules])
    _share(joined, modules)
    return joined


def _turned(*modules: Any) -> Tensor:
    """The same as `[in, out]`."""
    turned = torch.cat([module.weight.detach() for module in modules]).t().contiguous()
    _share(turned.t(), modules)
    return turned


def _share(joined: Tensor, modules: tuple[Any, ...]) -> None:
    first = 0
    for module in modules:
        last = first + module.weight.shape[0]
        module.weight = nn.Parameter(joined[first:last], requires_grad=False)
        first = last


def signed_angles(rotary: Any, positions: Tensor, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine `[positions, dim]` of rotary embedding (arXiv:2104.09864), halves
    paired: x becomes `x cosine + swap(x) sine`. In the dtype of `like`."""
    cosine, sine = rotary(like, position_ids=positions[None])
    half = sine.shape[-1] // 2
    signed = torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)
    return cosine[0], signed[0]


def _rotated(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """As `signed_angles` says."""
    half = heads.shape[-1] // 2
    swapped = heads.roll(half, dims=-1)
    return torch.addcmul(heads * cosine, swapped, signed_sine)
