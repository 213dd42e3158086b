"""ModelShape: what one forward pass of a decoder reads and computes, counted from the model that
transformers builds on torch's meta device, which has shapes but no data. Models are found by name:
a preset, the built-in pair, a config.json, its folder, or the hub's local cache. Nothing is ever
downloaded.

`models.csv` has the presets: the relevant fields of each published config.json; other fields take
transformers' defaults for the family. `qwen2.5` are the instruct models (32k positions without
YaRN), `deepseek-v3` is without its multi-token prediction.

Norms, biases and everything outside matrix products are left out: less than a thousandth of a model
of a billion parameters. Only families whose counts are tested are accepted.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import BUILTIN, Role, model_folder
from engine.errors import ModelError, one_line
from engine.model.rope import served_positions

FAMILIES = {
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: `count` per layer, of which a token uses `per_token`."""

    count: int
    per_token: int
    weights: int  # of one expert per layer, summed over layers

    def touched(self, tokens: int) -> float:
        """Return the expected number of a layer's experts that at least one of `tokens` tokens
        uses, if tokens choose independently and evenly: E (1 - (1 - k/E)^n)."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. `windows`: each layer's attention window, None: unlimited.
    `kv_values`: numbers that a layer caches per token. `attention_flops`: a layer's FLOPs per query
    token and cached position, scores and weighted sum together. `dense_weights`: weights that every
    forward pass reads in full, without the output head. `max_positions`: the model's limit;
    `served_positions`: the longest sequence that is served; None: not stated."""

    name: str
    vocab: int
    windows: tuple[int | None, ...]
    kv_values: int
    attention_flops: int
    dense_weights: int
    head_weights: int  # the embedding table has as many
    tied: bool
    experts: Experts | None
    max_positions: int | None
    served_positions: int | None

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def table_weights(self) -> int:
        """Weights of the embedding table and head, counted once if tied."""
        return (1 if self.tied else 2) * self.head_weights

    @property
    def parameters(self) -> int:
        """All weights."""
        routed = self.experts.count * self.experts.weights if self.experts else 0
        return self.dense_weights + routed + self.table_weights

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with (the embedding table is looked up)."""
        routed = self.experts.per_token * self.experts.weights if self.experts else 0
        return self.dense_weights + routed + self.head_weights

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the KV cache until a window is full."""
        return self.layers * self.kv_values

    def attended(self, context: int) -> int:
        """Return how many cached positions one query attends to, summed over layers."""
        return sum(min(context, window or context) for window in self.windows)


def model_shape(config: Any, name: str) -> ModelShape:
    """Return the shape for a transformers config; for a multimodal one, of its text model. Raises
    ModelError, and any error of transformers if it cannot build the model."""
    import torch  # slow, like transformers
    from transformers import AutoModelForCausalLM

    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{name} is of the family {config.model_type}; plan knows {known}")
    kv_values, attention_flops = _attention(config)
    if min(config.vocab_size, config.hidden_size, config.num_hidden_layers, kv_values) < 1:
        raise ModelError(f"the config.json of {name} has a size below 1")
    auto: Any = AutoModelForCausalLM  # its type stubs are too narrow
    with torch.device("meta"):
        model = auto.from_config(config)
    matrices = {key: weight for key, weight in model.named_parameters() if weight.ndim > 1}
    routed = {key: weight for key, weight in matrices.items() if ".experts." in key}
    head, tied = config.vocab_size * config.hidden_size, config.tie_word_embeddings
    others = sum(weight.numel() for key, weight in matrices.items() if key not in routed)
    return ModelShape(
        name=name,
        vocab=config.vocab_size,
        windows=_windows(config),
        kv_values=kv_values,
        attention_flops=attention_flops,
        dense_weights=others - (1 if tied else 2) * head,
        head_weights=head,
        tied=tied,
        experts=_experts(config, routed),
        max_positions=config.max_position_embeddings,
        served_positions=served_positions(config.max_position_embeddings, config.rope_parameters),
    )


def _attention(config: Any) -> tuple[int, int]:
    """Return a layer's KV numbers per token, and FLOPs per query token and cached position."""
    heads, latent = config.num_attention_heads, getattr(config, "kv_lora_rank", None)
    if latent is not None:
        # Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), decoded in its absorbed form:
        # the cache holds the latent and the rotated key, which all heads share.
        rope = config.qk_rope_head_dim
        return latent + rope, 2 * heads * (2 * latent + rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_key_value_heads * head_dim, 4 * heads * head_dim


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's window; without `layer_types` in the config, all layers are alike."""
    window = getattr(config, "sliding_window", None) or None
    if window is not None and not (isinstance(window, int) and window > 0):
        raise ModelError(f"sliding_window must be a number of tokens, but is {window!r}")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        layers: int = config.num_hidden_layers
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: Any, routed: dict[str, Any]) -> Experts | None:
    """Return the experts, given their matrices, in which transformers stacks those of a layer."""
    if not routed:
        return None
    count, per_token = next(iter(routed.values())).shape[0], config.num_experts_per_tok
    if per_token not in range(1, count + 1):
        raise ModelError(f"a token uses {per_token} of {count} experts (num_experts_per_tok)")
    return Experts(count, per_token, sum(weight.numel() for weight in routed.values()) // count)


Fields = dict[str, Any]


def _fields(row: dict[str, str]) -> Fields:
    numbers = {key: json.loads(cell) for key, cell in row.items() if cell and key != "model_type"}
    return {"model_type": row["model_type"], **numbers}


with Path(__file__).with_name("models.csv").open(encoding="utf-8", newline="") as file:
    PRESETS = {row.pop("name"): _fields(row) for row in csv.DictReader(file)}


def find_model(name: str, role: Role) -> ModelShape:
    """Return the shape of the model named `name`. Raises ModelError."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        if name in PRESETS:
            return model_shape(AutoConfig.for_model(**PRESETS[name]), name)
        config = AutoConfig.from_pretrained(
            model_folder(name, role), local_files_only=True, trust_remote_code=False
        )
        return model_shape(config, f"{BUILTIN}-{role}" if name == BUILTIN else name)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"--{role} {name} is neither a preset, a config.json, a folder with"
            " one, or a model in the hub's local cache, and plan downloads nothing; presets: "
            + ", ".join([BUILTIN, *PRESETS])
        ) from error
    except Exception as error:  # transformers raises many types
        reason = one_line(error)
        raise ModelError(f"the config.json of --{role} {name} cannot be used: {reason}") from error
