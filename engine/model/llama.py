"""Plain Llamas in a local folder, loaded without transformers.

Importing the model classes of transformers takes about three seconds of CPU time, more than the
rest of a start with the built-in pair. Arithmetic and module names are those of transformers, so
code that inspects a model works with both, and the logits are identical to the bit
(tests/model/test_llama.py). Any other model, and any faulty file, is left to transformers, which
also reports the error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu, softmax

from engine.attention.interface import PreparedAttention, Variation
from engine.config import Role
from engine.progress import counted

Angles = tuple[Tensor, Tensor]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STRICT = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def _dtype(name: object) -> torch.dtype | None:
    return _DTYPES.get(name) if isinstance(name, str) else None


# The bound is above any model's size, and a product of three sizes does not overflow.
_Size = Annotated[int, Field(gt=0, le=2**20)]
_Off = Annotated[bool, Field(le=False)]  # Literal[False] would take 0, and Literal[1] true
_One = Annotated[int, Field(ge=1, le=1)]


class _Rope(BaseModel):
    model_config = _STRICT | ConfigDict(extra="forbid")

    rope_type: Literal["default"]
    rope_theta: Annotated[float, Field(gt=0)]


class LlamaConfig(BaseModel):
    """A config.json with known fields only. Fields that do not affect logits are checked by type
    alone. transformers handles, or refuses, every other config."""

    model_config = _STRICT | ConfigDict(extra="forbid")

    model_type: Literal["llama"]
    architectures: tuple[Literal["LlamaForCausalLM"]]
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=2**10)]
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size
    max_position_embeddings: PositiveInt
    rms_norm_eps: Annotated[float, Field(gt=0)]
    rope_parameters: _Rope
    tie_word_embeddings: bool
    dtype: Annotated[torch.dtype, BeforeValidator(_dtype)]
    eos_token_id: int | tuple[int, ...] | None
    hidden_act: Literal["silu"]
    attention_bias: _Off
    mlp_bias: _Off
    pretraining_tp: _One = 1
    layer_types: None = None
    attention_dropout: float | None = None
    bos_token_id: int | None = None
    initializer_range: Annotated[float, Field(ge=0, le=1)] = 0.02
    pad_token_id: int | None = None
    transformers_version: str | None = None
    use_cache: bool = True


class GenerationConfig(BaseModel):
    """The fields needed from a generation_config.json."""

    model_config = _STRICT

    eos_token_id: int | tuple[int, ...] | None = None


class Output(NamedTuple):
    logits: Tensor  # [1, kept, vocab]


class LlamaRMSNorm(nn.Module):
    """RMSNorm (arXiv:1910.07467)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, device="meta"))
        self.variance_epsilon = config.rms_norm_eps

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * normed.to(rows.dtype)


class LlamaRotaryEmbedding(nn.Module):
    """RoPE (arXiv:2104.09864): cosine and sine `[1, rows, head_dim]` of positions, in the dtype of
    `like`; angles are float32 in any case."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self._frequencies = 1.0 / (config.rope_parameters.rope_theta ** (dims / config.head_dim))

    @torch.no_grad()
    def forward(self, like: Tensor, position_ids: Tensor) -> Angles:
        half = position_ids[..., None].float() * self._frequencies
        angles = torch.cat([half, half], dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class LlamaAttention(nn.Module):
    """Attention as prepared for this forward; if nothing is prepared, plain causal attention."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        inner = config.num_attention_heads * config.head_dim
        kept = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, inner)
        self.k_proj = _linear(config.hidden_size, kept)
        self.v_proj = _linear(config.hidden_size, kept)
        self.o_proj = _linear(inner, config.hidden_size)

    def forward(self, rows: Tensor, angles: Angles, prepared: PreparedAttention | None) -> Tensor:
        shape = (*rows.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (p(rows).view(shape).transpose(1, 2) for p in projections)
        query, key = _rotated(query, *angles), _rotated(key, *angles)
        if prepared is None:
            attended = self._causal(query, key, value)
        else:
            attended = prepared.run(self.layer_idx, query, key, value, Variation(self.scaling))
        output: Tensor = self.o_proj(attended.reshape(*rows.shape[:-1], -1).contiguous())
        return output

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention over all rows of one sequence, `[1, rows, heads, head_dim]`."""
        if self.groups > 1:
            key, value = (x.repeat_interleave(self.groups, dim=1) for x in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        unseen = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min, dtype=scores.dtype)
        weights = softmax(scores + unseen.triu(1), dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2).contiguous()


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config)
        self.post_attention_layernorm = LlamaRMSNorm(config)

    def forward(self, rows: Tensor, angles: Angles, prepared: PreparedAttention | None) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), angles, prepared)
        output: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output


class LlamaModel(nn.Module):
    """The model without its output embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        layers = [LlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        vocab, width = config.vocab_size, config.hidden_size
        empty = torch.empty(vocab, width, device="meta")  # `_weight` avoids a random initialization
        self.embed_tokens = nn.Embedding(vocab, width, _weight=empty)  # with slow imports
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, prepared: PreparedAttention | None
    ) -> Tensor:
        rows: Tensor = self.embed_tokens(input_ids)
        angles = self.rotary_emb(rows, position_ids=positions)
        for layer in self.layers:
            rows = layer(rows, angles, prepared)
        normed: Tensor = self.norm(rows)
        return normed


class Llama(nn.Module):
    """A Llama with the attributes and methods of a transformers model that are used here."""

    def __init__(self, config: LlamaConfig, generation_config: GenerationConfig) -> None:
        super().__init__()
        self.config = config
        self.generation_config = generation_config
        self.model = LlamaModel(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)

    @property
    def base_model(self) -> LlamaModel:
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        """Do nothing: the prepared attention decides."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        foredraft: PreparedAttention | None = None,
    ) -> Output:
        """Run one sequence `[1, rows]`. `logits_to_keep`: how many last rows (0: all), or which."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        rows = self.model(input_ids, position_ids, foredraft)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return Output(self.lm_head(rows[:, kept]))


def read_llama(folder: Path, role: Role = "target") -> Llama | None:
    """Load a plain Llama on the CPU in its stored precision. None for any other model, and unless
    one file holds exactly its weights."""
    try:
        config = LlamaConfig.model_validate_json((folder / "config.json").read_bytes())
        file = folder / "generation_config.json"
        generation = GenerationConfig()
        if file.is_file():
            generation = GenerationConfig.model_validate_json(file.read_bytes())
        model, weights = Llama(config, generation), load_file(folder / "model.safetensors")
    except (OSError, ValidationError, SafetensorError):
        return None
    return model if _fill(model, weights, f"loading the {role}") else None


def _fill(model: Llama, weights: dict[str, Tensor], stage: str) -> bool:
    """Load the weights; False unless names, shapes and dtype are those of the configuration."""
    tied = model.config.tie_word_embeddings
    shapes = {name: w.shape for name, w in model.named_parameters()}
    if tied:
        del shapes["lm_head.weight"]
    given = {name: weight.shape for name, weight in weights.items()}
    types = {weight.dtype for weight in weights.values()}
    if given != shapes or types != {model.config.dtype}:
        return False
    read = {name: weights[name].clone() for name in counted(stage, given)}
    model.load_state_dict(read, strict=False, assign=True)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return True


def _linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, bias=False, device="meta")


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `[1, heads, rows, head_dim]`; number i is paired with i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads * cosine[:, None]) + (turned * sine[:, None])
