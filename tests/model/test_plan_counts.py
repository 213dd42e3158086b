"""What `foredraft plan` counts from a configuration matches transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache

from engine.lab.plan.shape import FAMILIES, model_shape

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 80,
    "vocab_size": 100,
    "pad_token_id": None,
    "sliding_window": 7,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_counts_are_those_of_transformers(family: str, tied: bool) -> None:
    """Law: for every family that plan reads, transformers' model has the same number of weights
    without norms and biases, of KV numbers per token, and of positions per layer."""
    is_latent = family.startswith("deepseek")  # transformers caches this per head
    kv_heads = SMALL["num_attention_heads" if is_latent else "num_key_value_heads"]
    own = {key: SMALL[key] for key in SMALL if hasattr(CONFIG_MAPPING[family], key)}
    own |= {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(family, **own)
    shape = model_shape(config, family)
    build: Any = AutoModelForCausalLM
    model, cache = build.from_config(config).eval(), DynamicCache(config=config)
    layers: list[Any] = cache.layers
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
    assert shape.parameters == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    for layer, window in zip(layers, shape.windows, strict=True):
        cached = layer.keys.numel() + layer.values.numel()
        assert shape.kv_values == (12 + 4 if is_latent else cached)
        assert getattr(layer, "sliding_window", None) == window
