"""Published models by name: the fields of their config.json that count, as their makers state them.

`qwen2.5` are the instruct models (32k positions without YaRN), `deepseek-v3` is without its
multi-token prediction layer.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def _dense(
    family: str, hidden: int, layers: int, heads: tuple[int, int], wide: int, vocab: int,
    *, positions: int, tied: bool = False, **more: Any,
) -> Fields:  # fmt: skip
    """`heads`: of queries, and of keys and values."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": wide,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **more,
    }


def _llama(
    hidden: int, layers: int, heads: tuple[int, int], wide: int, *, tied: bool = False
) -> Fields:
    return _dense("llama", hidden, layers, heads, wide, 128_256, positions=131_072, tied=tied)


def _qwen2(
    hidden: int, layers: int, heads: tuple[int, int], wide: int, *, tied: bool = False
) -> Fields:
    vocab = 151_936 if tied else 152_064  # the smaller models' tables are padded less
    return _dense("qwen2", hidden, layers, heads, wide, vocab, positions=32_768, tied=tied)


def _qwen3(
    hidden: int, layers: int, heads: tuple[int, int], wide: int, *, tied: bool = False, **more: Any
) -> Fields:
    family = "qwen3_moe" if more else "qwen3"
    return _dense(
        family, hidden, layers, heads, wide, 151_936, positions=40_960, tied=tied, head_dim=128,
        **more,
    )  # fmt: skip


def _gemma2(hidden: int, layers: int, heads: tuple[int, int], wide: int, head_dim: int) -> Fields:
    return _dense(
        "gemma2", hidden, layers, heads, wide, 256_000, positions=8192, tied=True,
        head_dim=head_dim, sliding_window=4096,
    )  # fmt: skip


def _routed(count: int, per_token: int, wide: int) -> Fields:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": wide,
        "decoder_sparse_step": 1,
    }


DEEPSEEK_V3 = _dense(
    "deepseek_v3", 7168, 61, (128, 128), 18_432, 129_280, positions=163_840,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048,
    first_k_dense_replace=3, moe_layer_freq=1,
)  # fmt: skip

PRESETS: dict[str, Fields] = {
    "llama-3.1-8b": _llama(4096, 32, (32, 8), 14_336),
    "llama-3.1-70b": _llama(8192, 80, (64, 8), 28_672),
    "llama-3.1-405b": _llama(16_384, 126, (128, 8), 53_248),
    "llama-3.2-1b": _llama(2048, 16, (32, 8), 8192, tied=True),
    "llama-3.2-3b": _llama(3072, 28, (24, 8), 8192, tied=True),
    "llama-3.3-70b": _llama(8192, 80, (64, 8), 28_672),
    "qwen2.5-0.5b": _qwen2(896, 24, (14, 2), 4864, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, (12, 2), 8960, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, (16, 2), 11_008, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, (28, 4), 18_944),
    "qwen2.5-14b": _qwen2(5120, 48, (40, 8), 13_824),
    "qwen2.5-32b": _qwen2(5120, 64, (40, 8), 27_648),
    "qwen2.5-72b": _qwen2(8192, 80, (64, 8), 29_568),
    "qwen3-0.6b": _qwen3(1024, 28, (16, 8), 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, (16, 8), 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, (32, 8), 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, (32, 8), 12_288),
    "qwen3-14b": _qwen3(5120, 40, (40, 8), 17_408),
    "qwen3-32b": _qwen3(5120, 64, (64, 8), 25_600),
    "qwen3-30b-a3b": _qwen3(2048, 48, (32, 4), 6144, **_routed(128, 8, 768)),
    "qwen3-235b-a22b": _qwen3(4096, 94, (64, 4), 12_288, **_routed(128, 8, 1536)),
    "mistral-7b-v0.3": _dense("mistral", 4096, 32, (32, 8), 14_336, 32_768, positions=32_768),
    "mixtral-8x7b": _dense(
        "mixtral", 4096, 32, (32, 8), 14_336, 32_000, positions=32_768,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "gemma-2-2b": _gemma2(2304, 26, (8, 4), 9216, 256),
    "gemma-2-9b": _gemma2(3584, 42, (16, 8), 14_336, 256),
    "gemma-2-27b": _gemma2(4608, 46, (32, 16), 36_864, 128),
    "deepseek-v3": DEEPSEEK_V3,
}  # fmt: skip
