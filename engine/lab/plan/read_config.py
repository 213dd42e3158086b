"""ModelShape from the fields of a config.json, as transformers names and reads them.

A family is read only if its weights can be counted by rule; the keys that its layout depends on
must be there. Everything else is refused with a ModelError that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelError
from engine.lab.plan.shape import Attention, Experts, ModelShape

MIXTRAL = {"mixtral"}
QWEN_MOE = {"qwen2_moe", "qwen3_moe"}
DEEPSEEK = {"deepseek_v2", "deepseek_v3"}
GEMMA = {"gemma", "gemma2", "gemma3_text"}  # their embedding tables are tied unless said otherwise
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "phi3"} | GEMMA | MIXTRAL | QWEN_MOE | DEEPSEEK

LARGEST = 10**8  # of any number in a config.json that is believed
MOST_LAYERS = 1000


class Config:
    """A config.json with typed look-ups. Raises ModelError with the model's name and the key."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self.fields, self.name = fields, name

    def wrong(self, key: str, wanted: str) -> ModelError:
        if key not in self.fields:
            return ModelError(f"the config.json of {self.name} has no {key}; it must be {wanted}")
        given = repr(self.fields[key])
        shown = given if len(given) <= 60 else given[:57] + "..."
        return ModelError(
            f"the config.json of {self.name} has {key} = {shown}; it must be {wanted}"
        )

    def whole(self, key: str, *, least: int = 1, most: int = LARGEST) -> int:
        value = self.fields.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional(self, key: str, *, least: int = 1, most: int = LARGEST) -> int | None:
        """The number, or None where the key is missing or null."""
        if self.fields.get(key) is None:
            return None
        return self.whole(key, least=least, most=most)

    def flag(self, key: str, default: bool) -> bool:
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def items(self, key: str) -> list[Any] | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, list):
            raise self.wrong(key, "a list")
        return value


def model_shape(fields: Any, name: str) -> ModelShape:
    """The shape of the model called `name`; multimodal configs give that of their text model.
    Raises ModelError."""
    if isinstance(fields, dict) and isinstance(fields.get("text_config"), dict):
        fields = fields["text_config"]
    if not isinstance(fields, dict):
        raise ModelError(f"the config.json of {name} is no JSON object")
    config = Config(fields, name)
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise config.wrong("model_type", f"one of {', '.join(sorted(FAMILIES))}")
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    mlp_weights, experts = _mlps(config, family, layers)
    return ModelShape(
        name=name,
        hidden=config.whole("hidden_size"),
        vocab=config.whole("vocab_size"),
        tied=config.flag("tie_word_embeddings", family in GEMMA),
        attention=_latent(config) if family in DEEPSEEK else _grouped(config, family),
        windows=_windows(config, family, layers),
        mlp_weights=mlp_weights,
        experts=experts,
        max_positions=config.optional("max_position_embeddings"),
    )


def _grouped(config: Config, family: str) -> Attention:
    """Grouped-query attention (arXiv:2305.13245)."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    given = config.optional("num_key_value_heads")
    # Configs of llama from before grouped queries do not have the key.
    kv_heads = heads if given is None and family == "llama" else config.whole("num_key_value_heads")
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = config.optional("head_dim")
    if head_dim is None:
        if family in GEMMA or hidden % heads:
            raise config.wrong("head_dim", "a whole number")
        head_dim = hidden // heads
    query, kv = heads * head_dim, kv_heads * head_dim
    return Attention(
        weights=hidden * (2 * query + 2 * kv), kv_values=2 * kv, flops_per_position=4 * query
    )


def _latent(config: Config) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), decoded in its absorbed form:
    the cache holds the latent and the rotated key, which all heads share."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    latent, rope = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    plain, value = config.whole("qk_nope_head_dim"), config.whole("v_head_dim")
    rank = config.optional("q_lora_rank")
    query = heads * (plain + rope)
    weights = (
        (hidden * query if rank is None else rank * (hidden + query))
        + hidden * (latent + rope)
        + latent * heads * (plain + value)
        + heads * value * hidden
    )
    return Attention(
        weights=weights,
        kv_values=latent + rope,
        flops_per_position=2 * heads * (latent + rope) + 2 * heads * latent,
    )


def _mlps(config: Config, family: str, layers: int) -> tuple[int, Experts | None]:
    """Weights that every token meets in the MLPs (gated: three matrices each), and the experts."""
    hidden = config.whole("hidden_size")
    if family not in MIXTRAL | QWEN_MOE | DEEPSEEK:
        return 3 * hidden * config.whole("intermediate_size") * layers, None
    own = "n_routed_experts" if family in DEEPSEEK else "num_experts"
    # transformers 5 writes the key of all families alike.
    count = config.whole("num_local_experts" if "num_local_experts" in config.fields else own)
    per_token = config.whole("num_experts_per_tok", most=count)
    wide = config.whole("intermediate_size" if family in MIXTRAL else "moe_intermediate_size")
    shared = 0
    if family == "qwen2_moe":
        shared = config.whole("shared_expert_intermediate_size")
    elif family in DEEPSEEK:
        shared = wide * (config.optional("n_shared_experts", least=0) or 0)
    sparse = sum(_is_sparse(config, family, layer) for layer in range(layers))
    plain = 0
    if sparse < layers:
        plain = (layers - sparse) * 3 * hidden * config.whole("intermediate_size")
    routers = count + (family == "qwen2_moe")  # its shared expert has a gate of its own
    always = plain + sparse * hidden * (3 * shared + routers)
    return always, Experts(count, per_token, 3 * hidden * wide, sparse) if sparse else None


def _is_sparse(config: Config, family: str, layer: int) -> bool:
    if family in QWEN_MOE:
        step = config.optional("decoder_sparse_step") or 1
        return layer not in (config.items("mlp_only_layers") or []) and (layer + 1) % step == 0
    if family in DEEPSEEK:
        first = config.whole("first_k_dense_replace", least=0)
        return layer >= first and layer % (config.optional("moe_layer_freq") or 1) == 0
    return True


def _windows(config: Config, family: str, layers: int) -> tuple[int | None, ...]:
    """How far back each layer attends."""
    if family in {"llama", "gemma"} | DEEPSEEK:
        return (None,) * layers
    window = config.optional("sliding_window")
    if family.startswith("qwen") and not config.flag("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * layers
    kinds = config.items("layer_types")
    if kinds is not None:
        known = {"sliding_attention": window, "full_attention": None}
        if len(kinds) != layers or any(kind not in known for kind in map(str, kinds)):
            raise config.wrong(
                "layer_types", f"a list of {layers} of full_attention, sliding_attention"
            )
        return tuple(known[kind] for kind in kinds)
    return tuple(window if _slides(config, family, layer) else None for layer in range(layers))


def _slides(config: Config, family: str, layer: int) -> bool:
    if family == "gemma2":
        return layer % 2 == 0
    if family == "gemma3_text":
        return (layer + 1) % (config.optional("sliding_window_pattern") or 6) != 0
    if family.startswith("qwen"):
        return layer >= config.whole("max_window_layers", least=0)
    return True
