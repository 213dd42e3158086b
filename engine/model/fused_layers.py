"""Fused decoder layers for a transformers model: a few kernels per layer. CUDA only.

Query, key and value are one matrix product, gate and up another. Between products runs one kernel
of `engine.model.triton_layers`: a residual add with the next norm, a rotary embedding that also
writes the KV cache, or a gated activation. The model's own forward runs over these layers, so
whatever it does before and after the layers, and the arguments it passes to them, are unchanged.

FAMILIES lists the supported model types. The loader verifies that the logits are still right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.interface import (
    LayerProbe,
    LayerShape,
    PagedAttention,
    PreparedAttention,
    Variation,
)
from engine.config import QuantizationName
from engine.cpu.fused import joined
from engine.model.loaded import with_parts
from engine.model.triton_layers import ACTIVATIONS, Heads, Norm, added, gated, rotated
from engine.model.triton_products import Product, quantize

# Supported model types, and the number they add to the weights of a norm.
FAMILIES = {
    "gemma": 1.0, "gemma2": 1.0, "gemma3_text": 1.0, "granite": 0.0, "llama": 0.0, "mistral": 0.0,
    "mixtral": 0.0, "olmo2": 0.0, "phi3": 0.0, "qwen2": 0.0, "qwen3": 0.0, "qwen3_moe": 0.0,
}  # fmt: skip
# Names of the norms before and after attention, and before and after the MLP: in layers that have
# a norm after the MLP, and in all others.
SANDWICHED = (
    "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")
FEW, EVERY = 16, 1 << 62  # most rows of a typical decode forward; no limit


def fused_layers(model: Any, shapes: Sequence[LayerShape]) -> Any:
    """Return the model with fused layers, or None if it is not supported. Parameters of the given
    model become views of merged ones."""
    body, probe = model.base_model, _Recorder()
    if model.config.model_type not in FAMILIES:
        return None
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=zero, position_ids=zero, use_cache=False, foredraft=probe)
    relay, layers = _Relay(), list[_Layer]()
    for layer, shape in zip(body.layers, shapes, strict=True):
        product = _merged(layer.self_attn, "qkv_proj", "q_proj", "k_proj", "v_proj")
        if product is None or shape.key_dim != shape.value_dim:
            return None
        layers.append(_Layer(layer, product, shape, probe.variations[shape.layer], relay))
        torch.cuda.empty_cache()  # the freed parts are too small for the next merged weights
    last = _norm(body, "norm", FAMILIES[model.config.model_type])
    for layer, following in zip(layers, [*(each.first for each in layers[1:]), last], strict=True):
        layer.following = following
    body = with_parts(body, layers=nn.ModuleList(layers), norm=_LastNorm(last, relay))
    return with_parts(model, **{model.base_model_prefix: body})


def make_batch_invariant(fused: Any, most: int = EVERY) -> str | None:
    """Make a row's bits independent of the other rows, in forwards of up to `most` rows; products
    of quantized weights are so in all. Returns why the layers cannot be made so, or None."""
    if any(hasattr(module, "experts") for module in fused.modules()):
        return "its products depend on which rows share an expert"
    for module in fused.modules():
        if type(module) is nn.Linear:
            rows = EVERY if hasattr(module, "quantization") else most
            module.forward = Product(module, rows)  # type: ignore[method-assign,assignment]
    return None


def obstacle_to_quantization(config: Any, dtype: torch.dtype) -> str | None:
    """Why these layers do not run the model with quantized weights, or None."""
    if config.model_type not in FAMILIES or hasattr(config, "num_local_experts"):
        return "there are no fused layers for its model type, or it is a mixture of experts"
    return None if dtype.itemsize == 2 else "set its dtype to 'auto', 'bfloat16' or 'float16'"


def quantize_layers(model: Any, device: torch.device, kind: QuantizationName) -> None:
    """Quantize all linear layers but the head, on the device, one after another: the unquantized
    ones need not fit there."""
    for module in model.base_model.modules():
        if type(module) is nn.Linear:
            quantize(module, device, kind)


class _Recorder(LayerProbe):
    """Also records each layer's Variation."""

    def __init__(self) -> None:
        super().__init__()
        self.variations: dict[int, Variation] = {}

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        self.variations[layer] = how
        return super().run(layer, query, key, value, how)


class _Relay:
    """Hands the norm that a layer's last kernel computed to the next layer or the final norm."""

    def __init__(self) -> None:
        self._output: tuple[Tensor, Tensor] | None = None

    def give(self, stream: Tensor, normed: Tensor) -> Tensor:
        self._output = stream, normed
        return stream

    def normed(self, stream: Tensor, norm: Norm | None) -> Tensor:
        output, self._output = self._output, None
        if output is not None and output[0] is stream:
            return output[1]
        return added(stream, pre=norm)[1]


class _Layer(nn.Module):
    """`following`: the first norm after this layer, computed by its last kernel."""

    following: Norm | None = None

    def __init__(
        self, layer: Any, product: nn.Linear, shape: LayerShape, how: Variation, relay: _Relay
    ) -> None:
        super().__init__()
        attention, self._mlp = layer.self_attn, layer.mlp
        offset = FAMILIES[attention.config.model_type]
        self._product, self._output = product, attention.o_proj
        self._index, self._how, self._relay = shape.layer, how, relay
        self._factor = float(getattr(layer, "residual_multiplier", 1.0))
        names = SANDWICHED if hasattr(layer, "post_feedforward_layernorm") else PLAIN
        norms = (_norm(layer, name, offset) for name in names)
        self.first, self._attended, self._second, self._fed = norms
        query_norm, key_norm = (_norm(attention, name, offset) for name in ("q_norm", "k_norm"))
        self._wide = (query_norm, key_norm)  # norms over all heads together
        if query_norm is None or query_norm.weight.numel() == shape.key_dim:
            self._wide = (None, None)
        else:
            query_norm = key_norm = None
        count = attention.o_proj.in_features // shape.value_dim
        self._heads = Heads(count, shape.kv_heads, shape.key_dim, query_norm, key_norm)
        self._gate_up = _merged(self._mlp, "gate_up_proj", "gate_proj", "up_proj")
        name = getattr(attention.config, "hidden_activation", None) or attention.config.hidden_act
        self._activation = ACTIVATIONS.get(name)

    def forward(
        self,
        stream: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        foredraft: PreparedAttention,
        **kwargs: Any,
    ) -> Tensor:
        factor = self._factor
        with torch.cuda.device_of(stream):  # type: ignore[no-untyped-call]  # for Triton's launches
            found = self._attend(
                self._relay.normed(stream, self.first), position_embeddings, foredraft
            )
            stream, normed = added(
                found, stream=stream, factor=factor, post=self._attended, pre=self._second
            )
            output = added(
                self._feed(normed), stream=stream, factor=factor, post=self._fed, pre=self.following
            )
        return self._relay.give(*output)

    def _attend(
        self, normed: Tensor, angles: tuple[Tensor, Tensor], prepared: PreparedAttention
    ) -> Tensor:
        packed, kinds = self._product(normed), self._heads.kinds
        sizes = [count * self._heads.dim for count in kinds]
        for norm, rows in zip((*self._wide, None), torch.split(packed, sizes, -1), strict=True):
            added(rows, pre=norm, output=rows)
        cache_slots = None
        if isinstance(prepared, PagedAttention):
            cache_slots = prepared.layer_slots(self._index, packed.dtype)
        query = rotated(packed, angles, self._heads, cache_slots)
        heads = packed.view(1, packed.shape[1], -1, self._heads.dim).transpose(1, 2)
        _, key, value = torch.split(heads, kinds, 1)
        attended = prepared.run(self._index, query, key, value, self._how)
        output: Tensor = self._output(attended.reshape(1, packed.shape[1], -1))
        return output

    def _feed(self, normed: Tensor) -> Tensor:
        if self._gate_up is None or self._activation is None:
            output: Tensor = self._mlp(normed)  # a mixture of experts, for example
            return output
        product = self._gate_up.forward
        if isinstance(product, Product) and product.takes(normed):
            output = self._mlp.down_proj(product.gated(normed, self._activation))
        else:
            output = self._mlp.down_proj(gated(self._gate_up(normed), self._activation))
        return output


class _LastNorm(nn.Module):
    def __init__(self, norm: Norm | None, relay: _Relay) -> None:
        super().__init__()
        self.norm, self._relay = norm, relay

    def forward(self, stream: Tensor) -> Tensor:
        return self._relay.normed(stream, self.norm)


def _norm(owner: Any, name: str, offset: float) -> Norm | None:
    module = getattr(owner, name, None)
    if module is None:
        return None
    epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm(module.weight, float(epsilon), offset)


def _merged(owner: Any, whole: str, *names: str) -> nn.Linear | None:
    """Return the linear layer `whole`, or else those of `names` merged into one; None if they are
    not plain or only some have a bias."""
    parts: list[Any] = [
        getattr(owner, name, None) for name in ([whole] if hasattr(owner, whole) else names)
    ]
    if any(type(part) is not nn.Linear for part in parts):
        return None
    biased = [part.bias is not None for part in parts]
    if len(set(biased)) > 1:
        return None
    merged: nn.Linear = parts[0]
    if len(parts) > 1:
        merged = nn.Linear(1, 1, bias=biased[0], device="meta")
        for name in ("weight", "bias", "scales"):
            if getattr(parts[0], name, None) is not None:
                tensor = joined(*parts, name=name)
                setattr(merged, name, nn.Parameter(tensor, requires_grad=False))
        merged.out_features, merged.in_features = len(merged.weight), parts[0].in_features
        if hasattr(parts[0], "quantization"):
            merged.quantization = parts[0].quantization
    return merged
