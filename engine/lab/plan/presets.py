"""Models by name: presets, the built-in pair, a config.json, its folder, or the hub's local cache.
Nothing is ever downloaded.

Presets are the fields of a config.json that count, as their makers state them. `qwen2.5` are the
instruct models (32k positions without YaRN), `deepseek-v3` is without its multi-token prediction.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from engine.config import BUILTIN, HUB_NAME, model_folder
from engine.errors import ModelError
from engine.lab.plan.shape import ModelShape, model_shape

Fields = dict[str, Any]
LARGEST_FILE = 2**22  # characters that are read: any file can be named, endless ones too


SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def _model(family: str, *sizes: int, tied: bool = False, **more: int) -> Fields:
    """`sizes` in the order of SIZES."""
    named = dict(zip(SIZES, sizes, strict=True))
    return {"model_type": family, "tie_word_embeddings": tied, **named, **more}


def _llama(*sizes: int, tied: bool = False) -> Fields:
    return _model("llama", *sizes, 128_256, 131_072, tied=tied)


def _qwen2(*sizes: int, tied: bool = False) -> Fields:
    vocab = 151_936 if tied else 152_064  # the smaller models' tables are padded less
    return _model("qwen2", *sizes, vocab, 32_768, tied=tied)


def _qwen3(*sizes: int, tied: bool = False, expert: int = 0) -> Fields:
    """`expert`: the width of each of 128; 0: there are none."""
    routed = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    family, more = ("qwen3_moe", routed) if expert else ("qwen3", {})
    return _model(family, *sizes, 151_936, 40_960, tied=tied, head_dim=128, **more)


def _gemma2(*sizes: int, head_dim: int) -> Fields:
    return _model("gemma2", *sizes, 256_000, 8192, tied=True, head_dim=head_dim,
                  sliding_window=4096)  # fmt: skip


PRESETS: dict[str, Fields] = {
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14_336),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28_672),
    "llama-3.1-405b": _llama(16_384, 126, 128, 8, 53_248),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, tied=True),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, tied=True),
    "llama-3.3-70b": _llama(8192, 80, 64, 8, 28_672),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11_008, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18_944),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27_648),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29_568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 25_600),
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 4, 6144, expert=768),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 4, 12_288, expert=1536),
    "mistral-7b-v0.3": _model("mistral", 4096, 32, 32, 8, 14_336, 32_768, 32_768),
    "mixtral-8x7b": _model("mixtral", 4096, 32, 32, 8, 14_336, 32_000, 32_768,
                           num_local_experts=8, num_experts_per_tok=2),
    "gemma-2-2b": _gemma2(2304, 26, 8, 4, 9216, head_dim=256),
    "gemma-2-9b": _gemma2(3584, 42, 16, 8, 14_336, head_dim=256),
    "gemma-2-27b": _gemma2(4608, 46, 32, 16, 36_864, head_dim=128),
    "deepseek-v3": _model(
        "deepseek_v3", 7168, 61, 128, 128, 18_432, 129_280, 163_840,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=2048, first_k_dense_replace=3,
    ),
}  # fmt: skip


def find_model(name: str, role: Literal["target", "draft"]) -> ModelShape:
    """The shape of the model that `name` means. Raises ModelError."""
    if name in PRESETS:
        return model_shape(PRESETS[name], name)
    file = _find_file(name, role)
    if not file.is_file():  # whoever opens a pipe waits for a writer
        raise ModelError(f"--{role} {name}: {file} is no regular file")
    try:
        with file.open(encoding="utf-8") as opened:
            fields = json.loads(opened.read(LARGEST_FILE))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return model_shape(fields, f"{BUILTIN}-{role}" if name == BUILTIN else name)


def _find_file(name: str, role: Literal["target", "draft"]) -> Path:
    path = model_folder(name, role)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    # os.path, unlike Path, says False of a name that no file can have.
    if os.path.exists(path):
        return Path(path)
    if HUB_NAME.fullmatch(name):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):
            if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
                return Path(found)
    raise ModelError(
        f"--{role} {name} is neither a preset nor a config.json, a folder with one, or a model in "
        "the hub's local cache, and plan downloads nothing; presets: "
        + ", ".join([BUILTIN, *PRESETS])
    )
