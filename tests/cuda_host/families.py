"""`python -m tests.cuda_host.families`, on the stand-in: print as one line of JSON which model
families' forwards can be captured with our attention kernel, what was reported against it, and the
most that a step of an engine asks of the device, with a draft of the same family."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from tests.cuda_host.counts import StandIn
from tests.cuda_host.limits import STEPS
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
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
K, SEQUENCES, WARM, CYCLE = 4, 4, 4, 16
PROMPT = 8  # tokens; with those of all steps, less than the 128 that phi3 supports here
MOST_NODES = 45  # in a forward: two layers and the rest, without the draws after it
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip

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
    "deepseek_v3": {
        "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1, **LATENT,
    },
}  # fmt: skip


def engine_of(folder: Path, family: str, own: dict[str, Any]) -> Engine:
    """Return an engine with a target of two layers and a draft of one, at fixed `K`."""
    models: dict[str, dict[str, Any]] = {}
    for role, layers in (("target", 2), ("draft", 1)):
        sizes = SIZES | own | {"num_hidden_layers": layers}
        if "layer_types" in sizes:
            sizes["layer_types"] = sizes["layer_types"][:layers]
        place = folder / role
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        models[role] = {"path": str(place), "dtype": own.get("dtype", "bfloat16")}
    config = EngineConfig.model_validate(
        {
            "device": "cuda", "attention": "triton", "cache": {"num_blocks": 64},
            "target": models["target"] | {"batch_invariant": family == STEADY},
            "schedule": {"max_step_tokens": 32, "max_sequences": SEQUENCES},
            "speculation": {
                "proposer": models["draft"], "companions": [],
                "controller": {"kind": "fixed", "k": K},
            },
        }
    )  # fmt: skip
    return Engine(config)


def stepped(engine: Engine, standin: StandIn) -> dict[str, int]:
    """Return the maximum of each of `STEPS` in any of `CYCLE` steps, and the least number of tokens
    of a sequence there, of a second time: in the first, pinned buffers are allocated."""
    for time in range(2):
        least, most = engine.ready.max_model_len, dict.fromkeys([step.name for step in STEPS], 0)
        for i in range(SEQUENCES):
            params = SamplingParams(seed=i, max_tokens=110, ignore_eos=True)
            prompt = [7 * i + j + 5 for j in range(PROMPT)]
            engine.add(Submit(f"{time} {i}", prompt, params, 0.0))
        for step in range(WARM + CYCLE):
            standin.lap()
            items = engine.step().items
            counts = standin.lap()
            if step >= WARM:
                least = min(least, *(len(item.tokens) for item in items))
                for each in STEPS:
                    most[each.name] = max(most[each.name], sum(counts[n] for n in each.counters))
        while engine.has_work:
            engine.step()
    return most | {"tokens": least}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin, found = StandIn(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        for family, own in FAMILIES.items():
            before, graphs, most = len(standin.violations), False, dict[str, int]()
            errors: list[str] = []
            try:
                engine = engine_of(Path(name, family), family, own)
                graphs = bool(engine._runner.padded)
                nodes = standin.counts["last graph nodes"] - standin.drawing if graphs else 0
                if nodes > MOST_NODES and family not in MIXTURES:
                    errors.append(f"a forward is {nodes} nodes")
                most = stepped(engine, standin)
            except Exception as error:  # report whatever the family's code raises
                errors.append(" ".join(str(error).split())[:300])
            standin.lap()
            errors += standin.violations[before:]
            found[family] = {"errors": errors, "graphs": graphs, "most": most}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
