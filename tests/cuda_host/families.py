"""`python -m tests.cuda_host.families`, on the stand-in: print as one line of JSON which model
families' forwards can be captured with our attention kernel, and what was reported against it."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from engine.config import DTypeName, EngineConfig
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.pair import runner_of
from tests.cuda_host.counts import StandIn
from tests.cuda_host.valueless import without_values

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 16,
    "short_factor": [1.0] * 16, "original_max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "device": "cuda", "attention": "triton", "schedule": {"max_step_tokens": 8},
}  # fmt: skip
STEADY = "qwen3, batch-invariant"
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
MOST_NODES = 45  # in a forward: two layers and the rest, without the draws after it
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, rope of Llama 3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama, dynamic rope": {"model_type": "llama", "rope_parameters": DYNAMIC},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    STEADY: {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "gemma2": {"model_type": "gemma2", **WINDOWS},
    "gemma3": {"model_type": "gemma3_text", **WINDOWS},
    "phi3, long rope": {
        "model_type": "phi3", "num_key_value_heads": 4, "rope_parameters": LONG,
        "original_max_position_embeddings": 128,
    },
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral in float32": {
        "model_type": "mixtral", "num_local_experts": 4, "dtype": "float32",
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def captured(
    folder: Path, dtype: DTypeName, config: EngineConfig, *, batch_invariant: bool
) -> bool:
    """Return whether the model's forwards are captured as graphs."""
    how: dict[str, Any] = {"dtype": dtype, "device": "cuda", "batch_invariant": batch_invariant}
    model = load_model(str(folder), role="target", **how)
    cache = KVCache(64, config.cache.block_size, model.device, scrap=True)
    return bool(runner_of(config, model, cache).padded)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin, found = StandIn(), dict[str, dict[str, Any]]()
    config = EngineConfig.model_validate(CONFIG)
    with tempfile.TemporaryDirectory() as name:
        for family, own in FAMILIES.items():
            folder = Path(name, family)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(SIZES | own), encoding="utf-8")
            before, graphs = len(standin.violations), False
            errors: list[str] = []
            dtype = own.get("dtype", "bfloat16")
            try:
                graphs = captured(folder, dtype, config, batch_invariant=family == STEADY)
            except Exception as error:  # report whatever the family's code raises
                errors.append(" ".join(str(error).split())[:300])
            nodes = standin.counts["last graph nodes"] - standin.drawing if graphs else 0
            if nodes > MOST_NODES and family not in MIXTURES:
                errors.append(f"a forward is {nodes} nodes")
            standin.lap()
            found[family] = {"errors": standin.violations[before:] + errors, "graphs": graphs}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
