"""`python -m tests.cuda_host.quantised`, on the stand-in: run a tiny Llama with quantized weights
or KV cache. Prints one line of JSON: for each variant the violations, how weights and keys are
stored, whether forwards are graphs, and the kernels of the last one."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.loader import load_model
from engine.model.pair import Pair, runner_of, shared_cache
from tests.cuda_host.counts import StandIn
from tests.cuda_host.families import SIZES
from tests.cuda_host.valueless import without_values

VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "int8": {"target": {"quantization": "int8"}},
    "int4": {"target": {"quantization": "int4"}},
    "fp8": {"target": {"quantization": "fp8"}},
    "keys in fp8": {"cache": {"dtype": "fp8"}},
    "both in fp8": {"target": {"quantization": "fp8"}, "cache": {"dtype": "fp8"}},
}


def found(folder: Path, settings: dict[str, Any], standin: StandIn) -> dict[str, Any]:
    config = EngineConfig.model_validate({
        "device": "cuda", "attention": "triton", "schedule": {"max_step_tokens": 200},
        "target": {"path": str(folder), **settings.get("target", {})},
        "cache": {"num_blocks": 64, **settings.get("cache", {})},
    })  # fmt: skip
    kind = config.target.quantization
    model = load_model(
        str(folder), role="target", dtype="bfloat16", device="cuda", quantization=kind
    )
    runner = runner_of(config, model, shared_cache(config, Pair(model)))
    linear = model.model.model.layers[0].mlp.up_proj
    return {
        "weights": getattr(linear, "quantization", str(linear.weight.dtype)),
        "keys": str(runner._plane.stacks[0][0].dtype),
        "graphs": bool(runner.padded),
        "kernels": sum(standin.captured.values()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin, results = StandIn(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        sizes = SIZES | {"model_type": "llama"}
        Path(name, "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        for variant, settings in VARIANTS.items():
            before = len(standin.violations)
            results[variant] = found(Path(name), settings, standin)
            standin.lap()
            results[variant]["violations"] = standin.violations[before:]
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
