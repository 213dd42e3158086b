"""ModelShape: what one forward pass of a decoder reads and computes, counted in weights, on the
model that transformers builds on torch's meta device: shapes without numbers.

Norms, biases and what lies outside of the matrix products are left out: less than a thousandth of
a model of a billion parameters. A family is read only if its counts are tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.model.rope import served_positions

FAMILIES = {
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: `count` of them in a layer, `per_token` used by a token."""

    count: int
    per_token: int
    weights: int  # of one in each layer, together

    def touched(self, tokens: int) -> float:
        """Experts of a layer that at least one of `tokens` tokens is routed to, in expectation,
        if tokens choose independently and evenly: E (1 - (1 - k/E)^n)."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. `windows`: how far back each layer attends; None is all of it.
    `kv_values`: numbers that a layer caches per token. `attention_flops`: of a layer, per query
    token and cached position, scores and weighted sum together. `dense_weights`: those that every
    forward pass reads whole, the output head apart. `max_positions`: of the model;
    `served_positions`: the longest sequence that is served; None: it does not say."""

    name: str
    vocab: int
    windows: tuple[int | None, ...]
    kv_values: int
    attention_flops: int
    dense_weights: int
    head_weights: int  # and as many again of the embedding table
    tied: bool
    experts: Experts | None
    max_positions: int | None
    served_positions: int | None

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def table_weights(self) -> int:
        """Embedding table and head; tied ones are one."""
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
        """Numbers that one token adds to the cache, while no window is full."""
        return self.layers * self.kv_values

    def attended(self, context: int) -> int:
        """Cached positions that one query attends to at this context, summed over layers."""
        return sum(min(context, window or context) for window in self.windows)


def model_shape(config: Any, name: str) -> ModelShape:
    """Of a configuration of transformers; a multimodal one gives the shape of its text model.
    Raises ModelError, and what transformers raises where it cannot build the model."""
    import torch  # takes seconds, as transformers does
    from transformers import AutoModelForCausalLM

    config = config.get_text_config()
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{name} is of the family {config.model_type}; plan knows {known}")
    kv_values, attention_flops = _attention(config)
    if min(config.vocab_size, config.hidden_size, config.num_hidden_layers, kv_values) < 1:
        raise ModelError(f"the config.json of {name} has a size below 1")
    auto: Any = AutoModelForCausalLM  # its stubs know one return value
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
    """A layer's numbers of KV per token, and its FLOPs per query token and cached position."""
    heads, latent = config.num_attention_heads, getattr(config, "kv_lora_rank", None)
    if latent is not None:
        # Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), decoded in its absorbed form:
        # the cache holds the latent and the rotated key, which all heads share.
        rope = config.qk_rope_head_dim
        return latent + rope, 2 * heads * (2 * latent + rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_key_value_heads * head_dim, 4 * heads * head_dim


def _windows(config: Any) -> tuple[int | None, ...]:
    """How far back each layer attends: all alike where the configuration has no kinds of layers."""
    window = getattr(config, "sliding_window", None) or None
    if window is not None and not (isinstance(window, int) and window > 0):
        raise ModelError(f"sliding_window must be a number of tokens, but is {window!r}")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        layers: int = config.num_hidden_layers
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: Any, routed: dict[str, Any]) -> Experts | None:
    """`routed`: their matrices, in which transformers stacks the experts of a layer."""
    if not routed:
        return None
    count, per_token = next(iter(routed.values())).shape[0], config.num_experts_per_tok
    if per_token not in range(1, count + 1):
        raise ModelError(f"a token uses {per_token} of {count} experts (num_experts_per_tok)")
    return Experts(count, per_token, sum(weight.numel() for weight in routed.values()) // count)
