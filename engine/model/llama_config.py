"""What the JSON files of a plain Llama may say, see `engine.model.llama`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt
from safetensors import safe_open

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STRICT = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def _dtype(name: object) -> torch.dtype | None:
    return _DTYPES.get(name) if isinstance(name, str) else None


_Off = Annotated[bool, Field(le=False)]  # Literal[False] would take 0, and Literal[1] true
_One = Annotated[int, Field(ge=1, le=1)]


class _Rope(BaseModel):
    model_config = _STRICT | ConfigDict(extra="forbid")

    rope_type: Literal["default"]
    rope_theta: Annotated[float, Field(gt=0)]


class LlamaConfig(BaseModel):
    """A config.json all of which is understood. Of what changes no logit only the type is looked
    at: whatever transformers refuses is left to it."""

    model_config = _STRICT | ConfigDict(extra="forbid")

    model_type: Literal["llama"]
    architectures: tuple[Literal["LlamaForCausalLM"]]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
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
    """What is needed of a generation_config.json."""

    model_config = _STRICT

    eos_token_id: int | tuple[int, ...] | None = None


def can_hold(file: Path, config: LlamaConfig) -> bool:
    """By the file's header and size, before anything is built: a number in a configuration may be
    any. Raises OSError and SafetensorError."""
    with safe_open(file, framework="pt") as weights:
        names = len(weights.keys())
    heads = max(config.num_attention_heads, config.num_key_value_heads) * config.head_dim
    widest = max(config.vocab_size, config.intermediate_size, heads)
    return config.num_hidden_layers <= names and widest * config.hidden_size <= file.stat().st_size
