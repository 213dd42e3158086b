"""EAGLE-3's draft head (Li et al., arXiv:2503.01840): one decoder layer over the target's hidden
states, with a vocabulary of its own.

Entry i of a text combines the target's hidden states at position i with the embedding of token
i + 1. It has position i and predicts token i + 2. After the last entry, the layer's own output
replaces the hidden states that the target has not computed yet.

Published checkpoints are read unchanged: config.json and model.safetensors or pytorch_model.bin,
in plain form or as written by `speculators`. The default target layers are those of the paper's
code: the inputs of layers 2, n/2 and n - 3, counted from 0. `eagle_aux_hidden_state_layer_ids` has
two readings: i means the output of layer i in plain files (SGLang, ModelOpt) and its input in files
of speculators (vLLM). Unexpected shapes raise a ModelError that names the tensor or the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from engine.attention.interface import LayerShape
from engine.config import ScheduleConfig
from engine.errors import ModelError, one_line
from engine.model.checkpoint import rotary_of
from engine.model.head_files import check_tensors, head_config, head_tensors, save_head
from engine.scheduling.memory import MemoryUse

WAITING = 32  # positions per sequence whose hidden states may wait; one step's are extra
FILES = "model.safetensors", "pytorch_model.bin", "model.pt"

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_LAYER, EMBEDDING = "midlayer.", "embed_tokens.weight"
_MAPS = ("d2t", "t2d")  # id offsets from draft to target; which target ids the draft has

# Attention over the rows of one or several sequences: queries `[rows, heads, dim]`, keys and values
# `[rows, kv_heads, dim]` to `[rows, heads * dim]`.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_Size = Annotated[int, Field(gt=0, le=2**20)]
_Off = Annotated[bool, Field(le=False)]


class HeadConfig(BaseModel):
    """The fields needed from a config.json; transformers reads the rotary embedding."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    architectures: tuple[
        Literal[
            "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
            "Eagle3Speculator", "Eagle3DraftModel",
        ]
    ] = Field(strict=False)  # fmt: skip
    num_hidden_layers: Annotated[int, Field(ge=1, le=1)]
    hidden_size: _Size
    target_hidden_size: _Size | None = None
    intermediate_size: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    vocab_size: _Size
    draft_vocab_size: _Size
    rms_norm_eps: Annotated[float, Field(gt=0)]
    hidden_act: Literal["silu"] = "silu"
    attention_bias: _Off = False
    mlp_bias: _Off = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    eagle_aux_hidden_state_layer_ids: Annotated[list[int], Field(min_length=1)] | None = None

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def shapes(self, features: int, *, embeds: bool) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor but the maps. `features`: the input width of `fc`;
        `embeds`: whether the head has its own embedding."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.dim, self.kv_heads * self.dim
        layer = {
            "self_attn.q_proj": (queries, 2 * width), "self_attn.k_proj": (keys, 2 * width),
            "self_attn.v_proj": (keys, 2 * width), "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner), "hidden_norm": (width,),
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
        }  # fmt: skip
        return {
            "fc.weight": (width, features),
            "norm.weight": (width,),
            "lm_head.weight": (self.draft_vocab_size, width),
            **{f"{_LAYER}{key}.weight": shape for key, shape in layer.items()},
            **({"input_norm.weight": (features,)} if self.norm_before_fc else {}),
            **({EMBEDDING: (self.vocab_size, width)} if embeds else {}),
        }


class Target(NamedTuple):
    """The facts of the target that a head must fit. `words` `[at least vocab_size, width]`: its
    embedding; the head is loaded to the same device and dtype."""

    words: Tensor
    vocab_size: int
    width: int  # of its hidden states
    layers: int


class EagleHead:
    """`weights`: by published names; `layers`: the target layers, counted from 0, whose outputs it
    reads; `target_ids`: int64 `[draft vocabulary]`; `shared`: names of the target's weights."""

    def __init__(
        self,
        config: HeadConfig,
        weights: Mapping[str, Tensor],
        rotary: Any,
        *,
        layers: tuple[int, ...],
        target_ids: Tensor,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self._shared = shared
        self._config, self.weights, self._rotary = config, weights, rotary
        self.layers, self.target_ids = layers, target_ids
        self.dtype, self.device = weights["fc.weight"].dtype, target_ids.device
        self.shape = LayerShape(0, config.kv_heads, config.dim, config.dim)

    @property
    def own_weights(self) -> dict[str, Tensor]:
        """Its weights, without those shared with the target."""
        return {key: each for key, each in self.weights.items() if key not in self._shared}

    def parts(self, schedule: ScheduleConfig) -> tuple[tuple[MemoryUse], tuple[MemoryUse]]:
        """Its parts of the memory plan: loaded weights, and hidden states that will wait."""
        size = sum(each.nbytes for each in self.own_weights.values())
        positions = schedule.max_sequences * WAITING + schedule.max_step_tokens
        features = self.weights["fc.weight"].shape[1] * self.dtype.itemsize
        note = f"of {positions} positions, {features} bytes each"
        waiting = MemoryUse("pending hidden states", positions * features, note)
        return (MemoryUse("weights of the head", size),), (waiting,)

    def mix(self, features: Tensor) -> Tensor:
        """Project the target's hidden states `[rows, layers * target width]` to `[rows, width]`."""
        if self._config.norm_before_fc:
            features = self._norm(features, "input_norm")
        return linear(features, self.weights["fc.weight"])

    def __call__(self, tokens: Tensor, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the layer's output `[rows, width]` for `rows`, each with its next token."""
        words = self._norm(embedding(tokens, self.weights[EMBEDDING]), _LAYER + "input_layernorm")
        normed = self._norm(rows, _LAYER + "hidden_norm")
        kept = normed if self._config.norm_before_residual else rows
        both, dim = torch.cat([words, normed], dim=-1), self._config.dim
        queries, keys, values = (
            self._linear(both, f"self_attn.{each}_proj").view(len(rows), -1, dim) for each in "qkv"
        )
        turned = _rotated(torch.cat([queries, keys], 1), *self._rotary(rows[None], positions[None]))
        queries, keys = torch.split(turned, [queries.shape[1], keys.shape[1]], dim=1)
        kept = kept + self._linear(attend(queries, keys, values), "self_attn.o_proj")
        inner = self._norm(kept, _LAYER + "post_attention_layernorm")
        gate, up = self._linear(inner, "mlp.gate_proj"), self._linear(inner, "mlp.up_proj")
        return kept + self._linear(silu(gate) * up, "mlp.down_proj")

    def logits(self, rows: Tensor) -> Tensor:
        """Return float32 logits `[rows, draft vocabulary]` of the layer's output."""
        return linear(self._norm(rows, "norm"), self.weights["lm_head.weight"]).float()

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        return linear(rows, self.weights[f"{_LAYER}{name}.weight"])

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return rms_norm(rows, weight.shape, weight, self._config.rms_norm_eps)


def _rotated(rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `rows` `[rows, heads, dim]` by angles `[1, rows, dim]`."""
    first, second = rows.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return rows * cosines[0][:, None] + turned * sines[0][:, None]


def load_eagle(
    path: str, folder: Path | None, target: Target, *, revision: str | None = None
) -> EagleHead:
    """Load a head from a local `folder`, or from the hub repository `path` if that is None. Raises
    ModelError."""
    name = f"the EAGLE heads {path!r}"
    fields = head_config(path, folder, revision, name)
    wrapped = "speculators_config" in fields
    if wrapped:
        inner = fields.get("transformer_layer_config")
        outer = {key: each for key, each in fields.items() if each is not None}
        fields = {**inner, **outer} if isinstance(inner, dict) else outer
    elif isinstance(fields.get("eagle_config"), dict):
        fields = {**fields["eagle_config"], **fields}
    config = _checked(fields, target, name)
    layers = _layers(config.eagle_aux_hidden_state_layer_ids, wrapped, target.layers, name)
    tensors = _named(head_tensors(path, folder, FILES, revision, name))
    maps = {key: tensors.pop(key) for key in _MAPS if key in tensors}
    embeds = EMBEDDING in tensors or target.words.shape[1] != config.hidden_size
    shapes = config.shapes(len(layers) * target.width, embeds=embeds)
    why = f"its vocabulary of {target.vocab_size}, its width of {target.width} and {len(layers)}"
    check_tensors(tensors, shapes, name, f"{why} of its layers, and config.json,")
    ids = _target_ids(maps, config, name)
    weights = {key: each.to(target.words) for key, each in tensors.items()}
    shared = frozenset({EMBEDDING} - weights.keys())
    weights.setdefault(EMBEDDING, target.words.detach())
    try:
        rotary = rotary_of(fields).to(target.words.device)
    except Exception as error:  # transformers raises any class
        what = f"{name} have a rotation in config.json that cannot be read"
        raise ModelError(f"{what}: {one_line(error)}") from error
    device = target.words.device
    ids = ids.to(device)
    return EagleHead(config, weights, rotary, layers=layers, target_ids=ids, shared=shared)


def save_eagle(head: EagleHead, fields: Mapping[str, Any], folder: Path) -> None:
    """Write a head in bfloat16 in the published format; `fields`: its config.json."""
    ids = head.target_ids.cpu()
    known = torch.isin(torch.arange(fields["vocab_size"]), ids)
    tensors = head.own_weights | {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    save_head(folder, FILES[0], fields, tensors)


def _checked(fields: Mapping[str, Any], target: Target, name: str) -> HeadConfig:
    """Parse the config. Raises ModelError if it is invalid or does not fit the target."""
    if "draft_vocab_size" not in fields:
        raise ModelError(
            f"{name} need a config.json with draft_vocab_size; this is another model's"
        )
    try:
        config = HeadConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field, given = first["loc"][0], f"{first['input']!r:.60}"
        what = "is missing" if first["type"] == "missing" else f"is {given}: {first['msg']}"
        raise ModelError(f"{name} cannot be used: {field} in config.json {what}") from error
    if config.vocab_size != target.vocab_size:
        wrong = f"vocab_size {config.vocab_size}; the target has {target.vocab_size} tokens"
        raise ModelError(f"{name} do not fit the target: {wrong}")
    if config.target_hidden_size not in (None, target.width):
        wrong = f"target_hidden_size {config.target_hidden_size}; the target's is {target.width}"
        raise ModelError(f"{name} do not fit the target: {wrong}")
    if config.draft_vocab_size > config.vocab_size:
        raise ModelError(f"{name} have a draft_vocab_size above their vocab_size")
    if config.num_attention_heads % config.kv_heads or config.dim % 2:
        raise ModelError(
            f"{name} have an odd head_dim or a num_key_value_heads that does not divide"
            " num_attention_heads"
        )
    return config


def _layers(indices: list[int] | None, wrapped: bool, count: int, name: str) -> tuple[int, ...]:
    """Return EagleHead.layers. Raises ModelError if they repeat or the target lacks one."""
    into = indices if wrapped else None
    if indices is None:
        into = [2, count // 2, count - 3]
    layers = [each - 1 for each in into] if into is not None else list(indices or ())
    if len({*layers}) < len(layers) or not all(0 <= each < count for each in layers):
        given = "lacks it, and by default are" if indices is None else "has"
        raise ModelError(
            f"{name} do not fit the target: {_LAYERS} {given} {indices or into}; its {count} layers"
            " need different ones of theirs"
        )
    return tuple(layers)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the paper's names, without the rotary table."""
    found = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("model.")
        if name.startswith("layers.0."):
            name = _LAYER + name.removeprefix("layers.0.")
        if not name.endswith("rotary_emb.inv_freq"):
            found[name] = tensor
    return found


def _target_ids(maps: Mapping[str, Tensor], config: HeadConfig, name: str) -> Tensor:
    """Return EagleHead.target_ids. Raises ModelError if the maps are missing or inconsistent."""
    size, every = config.draft_vocab_size, config.vocab_size
    d2t, t2d = maps.get("d2t"), maps.get("t2d")
    ids = torch.arange(size)
    if d2t is None:
        if size != every:
            raise ModelError(f"{name} lack the tensor 'd2t': draft_vocab_size is {size} of {every}")
    elif d2t.shape != (size,) or d2t.is_floating_point() or d2t.is_complex():
        kind = str(d2t.dtype).removeprefix("torch.")
        given = f"{kind} {list(d2t.shape)}"
        raise ModelError(f"{name} have a tensor 'd2t' that is {given}, not integers [{size}]")
    else:
        ids = ids + d2t.long()
    if ids.min() < 0 or ids.max() >= every or len({*ids.tolist()}) < size:
        where = f"outside the {every} tokens, or two to the same"
        raise ModelError(f"{name} have a tensor 'd2t' that maps an id {where}")
    if t2d is not None and (t2d.shape != (every,) or not t2d.bool()[ids].all()):
        raise ModelError(f"{name} have a tensor 't2d' that contradicts 'd2t'")
    return ids
