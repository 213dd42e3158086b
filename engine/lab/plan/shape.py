"""ModelShape: what one forward pass of a decoder reads and computes, counted in weights, from the
fields of a config.json as transformers names them.

Norms, biases and what lies outside of the matrix products are left out: less than a thousandth of
a model of a billion parameters. A family is read only if its weights can be counted by rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.model.rope import served_positions

_QWEN_MOE = {"qwen2_moe", "qwen3_moe"}
_DEEPSEEK = {"deepseek_v2", "deepseek_v3"}
_GEMMA = {"gemma", "gemma2", "gemma3_text"}  # their tables are tied unless said otherwise
_PLAIN = {"llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"}
FAMILIES = _PLAIN | _GEMMA | _QWEN_MOE | _DEEPSEEK
_MAY_BE_ZERO = {"first_k_dense_replace", "n_shared_experts", "max_window_layers"}
LARGEST = 10**8  # of any number in a config.json that is believed
MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer. `weights`: of its projections. `kv_values`: numbers cached per token.
    `flops_per_position`: per query token and cached position, scores and weighted sum together."""

    weights: int
    kv_values: int
    flops_per_position: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: `count` of them in each of `layers` layers, `per_token` used by a token."""

    count: int
    per_token: int
    weights: int  # of one expert
    layers: int

    def touched(self, tokens: int) -> float:
        """Experts of a layer that at least one of `tokens` tokens is routed to, in expectation,
        if tokens choose independently and evenly: E (1 - (1 - k/E)^n)."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. `windows`: how far back each layer attends; None is all of it.
    `mlp_weights`: dense MLPs, shared experts and routers of all layers. `max_positions`: of the
    model; `served_positions`: the longest sequence that is served; None: it does not say."""

    name: str
    vocab: int
    attention: Attention
    windows: tuple[int | None, ...]
    mlp_weights: int
    head_weights: int  # and as many again of the embedding table
    tied: bool
    experts: Experts | None
    max_positions: int | None
    served_positions: int | None

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def dense_weights(self) -> int:
        """Weights that every forward pass reads whole, the output head apart."""
        return self.layers * self.attention.weights + self.mlp_weights

    @property
    def table_weights(self) -> int:
        """Embedding table and head; tied ones are one."""
        return (1 if self.tied else 2) * self.head_weights

    @property
    def parameters(self) -> int:
        """All weights."""
        experts = self.experts
        routed = experts.layers * experts.count * experts.weights if experts else 0
        return self.dense_weights + routed + self.table_weights

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with (the embedding table is looked up)."""
        experts = self.experts
        routed = experts.layers * experts.per_token * experts.weights if experts else 0
        return self.dense_weights + routed + self.head_weights

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the cache, while no window is full."""
        return self.layers * self.attention.kv_values

    def attended(self, context: int) -> int:
        """Cached positions that one query attends to at this context, summed over layers."""
        return sum(min(context, window or context) for window in self.windows)


class _Fields:
    """The fields of a config.json, checked as they are read. Raises ModelError with the key."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self.raw, self.name = fields, name

    def wrong(self, key: str, wanted: str) -> ModelError:
        given = f"no {key}"
        if key in self.raw:
            shown = repr(self.raw[key])
            given = f"{key} = {shown if len(shown) <= 60 else shown[:57] + '...'}"
        return ModelError(f"the config.json of {self.name} has {given}; it must be {wanted}")

    def __getitem__(self, key: str) -> int:
        value, least = self.raw.get(key), 0 if key in _MAY_BE_ZERO else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
            raise self.wrong(key, f"a whole number from {least} to {LARGEST}")
        return value

    def get(self, key: str) -> int | None:
        """None where the key is missing or null."""
        return None if self.raw.get(key) is None else self[key]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if not (value is None or isinstance(value, bool)):
            raise self.wrong(key, "true or false")
        return default if value is None else value

    def items(self, key: str) -> list[Any] | None:
        value = self.raw.get(key)
        if not (value is None or isinstance(value, list)):
            raise self.wrong(key, "a list")
        return value


def model_shape(raw: Any, name: str) -> ModelShape:
    """The shape of the model called `name`; multimodal configs give that of their text model.
    Raises ModelError."""
    if isinstance(raw, dict) and isinstance(raw.get("text_config"), dict):
        raw = raw["text_config"]
    if not isinstance(raw, dict):
        raise ModelError(f"the config.json of {name} is no JSON object")
    fields, family = _Fields(raw, name), raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise fields.wrong("model_type", f"one of {', '.join(sorted(FAMILIES))}")
    if fields["num_hidden_layers"] > MOST_LAYERS:
        raise fields.wrong("num_hidden_layers", f"at most {MOST_LAYERS}")
    mlp_weights, experts = _mlps(fields, family)
    positions = fields.get("max_position_embeddings")
    return ModelShape(
        name=name,
        vocab=fields["vocab_size"],
        attention=_latent(fields) if family in _DEEPSEEK else _grouped(fields, family),
        windows=_windows(fields, family),
        mlp_weights=mlp_weights,
        head_weights=fields["vocab_size"] * fields["hidden_size"],
        tied=fields.flag("tie_word_embeddings", family in _GEMMA),
        experts=experts,
        max_positions=positions,
        served_positions=served_positions(positions, _rope(fields)),
    )


def _rope(fields: _Fields) -> dict[str, Any] | None:
    """One, or one by kind of layer; older configs have its original length beside it."""
    rope = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters")
    if not isinstance(rope, dict):
        return None
    own = fields.get("original_max_position_embeddings")
    return rope if own is None else {"original_max_position_embeddings": own, **rope}


def _grouped(fields: _Fields, family: str) -> Attention:
    """Grouped-query attention (arXiv:2305.13245)."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    # Configs of llama from before grouped queries do not have the key.
    is_old = family == "llama" and fields.get("num_key_value_heads") is None
    kv_heads = heads if is_old else fields["num_key_value_heads"]
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = fields.get("head_dim")
    if head_dim is None:
        is_told = family not in _GEMMA and hidden % heads == 0
        head_dim = hidden // heads if is_told else fields["head_dim"]
    query, kv = heads * head_dim, kv_heads * head_dim
    return Attention(hidden * (2 * query + 2 * kv), 2 * kv, 4 * query)


def _latent(fields: _Fields) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), decoded in its absorbed form:
    the cache holds the latent and the rotated key, which all heads share."""
    hidden, heads, rank = (
        fields["hidden_size"], fields["num_attention_heads"], fields.get("q_lora_rank")
    )  # fmt: skip
    latent, rope = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    plain, value = fields["qk_nope_head_dim"], fields["v_head_dim"]
    query = heads * (plain + rope)
    weights = (
        (hidden * query if rank is None else rank * (hidden + query))
        + hidden * (latent + rope)
        + latent * heads * (plain + value)
        + heads * value * hidden
    )
    return Attention(weights, latent + rope, 2 * heads * (2 * latent + rope))


def _mlps(fields: _Fields, family: str) -> tuple[int, Experts | None]:
    """Weights that every token meets in the MLPs (gated: three matrices each), and the experts."""
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    if family not in {"mixtral"} | _QWEN_MOE | _DEEPSEEK:
        return 3 * hidden * fields["intermediate_size"] * layers, None
    own = "n_routed_experts" if family in _DEEPSEEK else "num_experts"
    # transformers 5 writes the key of all families alike.
    is_new = family == "mixtral" or "num_local_experts" in fields.raw
    count, per_token = fields["num_local_experts" if is_new else own], fields["num_experts_per_tok"]
    if per_token > count:
        raise fields.wrong("num_experts_per_tok", f"at most {count}")
    wide = fields["intermediate_size" if family == "mixtral" else "moe_intermediate_size"]
    shared = (fields.get("n_shared_experts") or 0) * wide if family in _DEEPSEEK else 0
    if family == "qwen2_moe":
        shared = fields["shared_expert_intermediate_size"]
    sparse = sum(_is_sparse(fields, family, layer) for layer in range(layers))
    plain = (layers - sparse) * fields["intermediate_size"] if sparse < layers else 0
    routers = count + (family == "qwen2_moe")  # its shared expert has a gate of its own
    always = 3 * hidden * plain + sparse * hidden * (3 * shared + routers)
    return always, Experts(count, per_token, 3 * hidden * wide, sparse) if sparse else None


def _is_sparse(fields: _Fields, family: str, layer: int) -> bool:
    if family in _QWEN_MOE:
        step = fields.get("decoder_sparse_step") or 1
        return layer not in (fields.items("mlp_only_layers") or []) and (layer + 1) % step == 0
    if family in _DEEPSEEK:
        step = fields.get("moe_layer_freq") or 1
        return layer >= fields["first_k_dense_replace"] and layer % step == 0
    return True


def _windows(fields: _Fields, family: str) -> tuple[int | None, ...]:
    """How far back each layer attends."""
    layers = fields["num_hidden_layers"]
    has_none = family in {"llama", "gemma"} | _DEEPSEEK
    is_off = family.startswith("qwen") and not fields.flag("use_sliding_window")
    window = None if has_none or is_off else fields.get("sliding_window")
    kinds = None if window is None else fields.items("layer_types")
    if kinds is None:
        return tuple(window if _slides(fields, family, layer) else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if len(kinds) != layers or any(kind not in known for kind in map(str, kinds)):
        raise fields.wrong("layer_types", f"a list of {layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _slides(fields: _Fields, family: str, layer: int) -> bool:
    """Where the config does not say it layer by layer."""
    if family == "gemma2":
        return layer % 2 == 0
    if family == "gemma3_text":
        return (layer + 1) % (fields.get("sliding_window_pattern") or 6) != 0
    if family.startswith("qwen") and fields.flag("use_sliding_window"):
        return layer >= fields["max_window_layers"]
    return True
