"""The memory plan, quantized weights and the benchmark of a machine, on a CUDA device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import MemoryPlanError
from engine.lab.bench.__main__ import main
from engine.lab.synthetic import main as synthesise
from engine.messages import SamplingParams, Submit
from tests.support import tiny
from tests.support.cuda import ON_CUDA

pytestmark = ON_CUDA
PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]


def build(target: str, draft: str, quantization: str = "none", **changes: Any) -> Engine:
    config: dict[str, Any] = {
        "target": {"path": target, "quantization": quantization},
        "device": "cuda",
        "schedule": {"max_step_tokens": 64, "max_sequences": 8},
        "speculation": {
            "proposer": {"path": draft},
            "controller": {"kind": "fixed", "k": 3},
        },
    }
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value}
    return Engine(EngineConfig.model_validate(config))


def test_the_plan_holds(tiny_target: str, tiny_draft: str) -> None:
    """Law: the memory in use after the start and some steps is within the plan, except for what the
    driver takes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # else the peak is that of earlier tests
    before = torch.cuda.memory_allocated()
    made = build(tiny_target, tiny_draft, cache={"num_blocks": 256})
    made.add(Submit("a", PROMPT, SamplingParams(seed=0, max_tokens=8, ignore_eos=True), 0.0))
    while made.has_work:
        made.step()
    planned = sum(size for name, size in made.ready.memory.items() if name != "limit")
    assert torch.cuda.max_memory_allocated() - before <= planned + (64 << 20)


def test_what_cannot_fit_is_refused(tiny_target: str, tiny_draft: str) -> None:
    with pytest.raises(MemoryPlanError, match="may be used on cuda"):
        build(tiny_target, tiny_draft, cache={"memory_fraction": 1e-6})


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_weights_serve(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Law: each request ends with all of its tokens, with a padding token's row of zeros, too."""
    wide = {**tiny.GROUPED, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**wide))
    folder = tmp_path_factory.mktemp("quantized")
    target = tiny.save(model, folder / "target")
    draft = tiny.save(tiny.draft_of(model), folder / "draft")
    made = build(target, draft, kind, cache={"num_blocks": 64})
    for seed in range(3):
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)
        made.add(Submit(str(seed), [*PROMPT, model.config.pad_token_id or 0], params, 0.0))
    count = 0
    while made.has_work:
        count += sum(len(output.tokens) for output in made.step().items)
    assert count == 36


def test_the_measuring_command_runs(tmp_path: Path) -> None:
    """Law: a small random pair is made and measured in the same way as one of 8 B."""
    made = tmp_path / "pair"
    assert synthesise(["--output", str(made), "--parameters", "3e7", "--device", "cuda"]) == 0
    given = ["--target", str(made / "target"), "--draft", str(made / "draft"), "--device", "cuda"]
    words = ["--rounds", "2", "--tokens", "32", "--json", str(tmp_path / "found.json")]
    assert main(["machine", *given, *words]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["costs"]["read"] > 0
