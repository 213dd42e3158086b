"""`python -m tests.cuda_host.families`, over the stand-in: which families' forwards can be
captured, as one line of JSON: what was said against it, by family."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
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
STEADY = "qwen3, batch-invariant"
MOST_NODES = 45  # of a forward: two layers and what is around them
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
}  # fmt: skip


def capture(folder: Path, config: EngineConfig, *, steady: bool) -> None:
    how: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "batch_invariant": steady}
    model = load_model(str(folder), role="target", **how)
    if steady:
        config = config.model_copy(update={"attention": "auto"})
    cache = KVCache(64, config.cache.block_size, model.device, scrap=True)
    runner_of(config, model, cache)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin, said = StandIn(), dict[str, list[str]]()
    config = EngineConfig.model_validate(
        {"device": "cuda", "attention": "flex", "schedule": {"max_step_tokens": 8}}
    )
    with tempfile.TemporaryDirectory() as name:
        for family, own in FAMILIES.items():
            folder = Path(name, family)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(SIZES | own), encoding="utf-8")
            before = len(standin.violations)
            errors: list[str] = []
            try:
                capture(folder, config, steady=family == STEADY)
            except Exception as error:  # whatever the family's code raises is told
                errors.append(" ".join(str(error).split())[:300])
            if (nodes := standin.counts["last graph nodes"]) > MOST_NODES:
                errors.append(f"a forward is {nodes} nodes")
            standin.lap()
            said[family] = standin.violations[before:] + errors
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
