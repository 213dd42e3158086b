"""`foredraft plan` counts weights by rule; transformers builds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
def test_weights_and_windows_are_those_of_transformers(family: str, tied: bool) -> None:
    """Law: for every family that plan reads, the matrices of transformers' model, norms and biases
    apart, have as many weights, and its layers attend as far back."""
    build: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(family, **SMALL, tie_word_embeddings=tied)
    shape = model_shape(config.to_dict(), family)
    with torch.device("meta"):
        model = build.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        window = getattr(config, "sliding_window", None)
        expected = [window if kind == "sliding_attention" else None for kind in kinds]
        assert list(shape.windows) == expected
