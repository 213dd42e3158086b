"""Tiny random models: seeded, float32, 128 tokens, saved as folders that any loader can read.

Large initial weights spread the logits, so that rounding errors do not decide an argmax. The draft
has the target's own embedding, first layer, norm and head, so it agrees with it sometimes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

VOCAB = 128
EOS = [2, 3]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "head_dim": 12}
ON_CUDA: dict[str, Any] = {**GROUPED, "head_dim": 16}


def llama(shape: dict[str, Any] = GROUPED) -> PreTrainedModel:
    """Later layers have small weights and the head large ones, so `draft_of` sometimes agrees."""
    model = build(LlamaForCausalLM, LlamaConfig(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lm_head" in name:
                parameter.mul_(3.0)
            elif ("o_proj" in name or "down_proj" in name) and "layers.0." not in name:
                parameter.mul_(0.3)
    return model


def qwen3() -> PreTrainedModel:
    """Query and key norms; head size larger than hidden size / heads."""
    return build(Qwen3ForCausalLM, Qwen3Config(**{**GROUPED, "head_dim": 16}))


def gpt_neox() -> PreTrainedModel:
    """Parallel residual, partial rotary embedding, biases, LayerNorm, no grouped-query heads."""
    return build(GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE))


def mistral() -> PreTrainedModel:
    """A sliding window in every layer."""
    return build(MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=7))


def gemma2() -> PreTrainedModel:
    """Soft-capped scores and logits; a sliding window in every other layer."""
    config = Gemma2Config(
        **GROUPED, sliding_window=7, query_pre_attn_scalar=12, attn_logit_softcapping=5.0
    )
    return build(Gemma2ForCausalLM, config)


def gemma3() -> PreTrainedModel:
    """Sliding-window layers with their own RoPE, then a full one; no soft cap."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **GROUPED, sliding_window=7, query_pre_attn_scalar=12, layer_types=kinds
    )
    return build(Gemma3ForCausalLM, config)


def gpt_oss() -> PreTrainedModel:
    """Learned attention sinks, sliding windows, experts."""
    config = GptOssConfig(
        **GROUPED,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return build(GptOssForCausalLM, config)


def mixtral(shape: dict[str, Any] = GROUPED, experts: int = 8) -> PreTrainedModel:
    """Two of `experts` per token, each of the full intermediate size."""
    return build(MixtralForCausalLM, MixtralConfig(**shape, num_local_experts=experts))


def qwen3_moe(shape: dict[str, Any] = GROUPED, experts: int = 8) -> PreTrainedModel:
    """Query and key norms; two of `experts` per token, of half the intermediate size."""
    few: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**shape, **few, moe_intermediate_size=shape["intermediate_size"] // 2)
    return build(Qwen3MoeForCausalLM, config)


def deepseek_v3() -> PreTrainedModel:
    """Latent attention, with keys of 20 and values of 12; experts after the first layer."""
    config = DeepseekV3Config(
        **SHAPE, num_key_value_heads=4,
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=48, first_k_dense_replace=1,
    )  # fmt: skip
    return build(DeepseekV3ForCausalLM, config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gpt_neox": gpt_neox,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
}


def build(model_class: Any, config: Any) -> PreTrainedModel:
    """Return a seeded random model; norms and biases differ from their trivial initial values."""
    torch.manual_seed(11)
    model: PreTrainedModel = model_class(config)
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def draft_of(target: PreTrainedModel, layers: int = 1) -> PreTrainedModel:
    """Return a draft of the target's first `layers` layers with the target's head."""
    settings = target.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    draft: PreTrainedModel = type(target)(type(target.config)(**settings))
    draft.train(False)
    names = draft.state_dict().keys()
    draft.load_state_dict({k: v for k, v in target.state_dict().items() if k in names})
    return draft


def save(model: PreTrainedModel, folder: Path) -> str:
    """Save as `save_pretrained` does, without its progress bar. Returns the folder as a string."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return str(folder)
