"""Plain Llamas without transformers: bit-identical to it, or left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.config import model_folder
from engine.model.llama import Llama, read_llama
from tests.support import tiny

IDS = torch.tensor([[5, 9, 1, 77, 9, 9, 0, 31, 126, 8, 40]])


def ours_and_theirs(folder: Path, dtype: torch.dtype) -> tuple[Llama, Any]:
    ours = read_llama(folder)
    assert ours is not None
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return ours.to(dtype), theirs


def saved(tmp_path: Path, **changes: Any) -> Path:
    config = LlamaConfig(**(tiny.GROUPED | {"dtype": torch.float32} | changes))
    return Path(tiny.save(tiny.build(LlamaForCausalLM, config), tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True}])
@torch.inference_mode()
def test_logits_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Law: bit-identical, so whatever is proven against ours holds against theirs."""
    ours, theirs = ours_and_theirs(saved(tmp_path, **changes), dtype)
    assert torch.equal(ours(IDS).logits, theirs(IDS, use_cache=False).logits)
    for keep in (2, torch.tensor([0, 10])):
        found = ours(IDS, logits_to_keep=keep).logits
        assert torch.equal(found, theirs(IDS, use_cache=False, logits_to_keep=keep).logits)
    names = {name for name, _ in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == names


@pytest.mark.parametrize("role", ["target", "draft"])
@torch.inference_mode()
def test_the_built_in_pair_is_read_here(role: Any) -> None:
    folder = Path(model_folder("demo", role))
    ours, theirs = ours_and_theirs(folder, torch.bfloat16)
    assert torch.equal(ours(IDS).logits, theirs(IDS, use_cache=False).logits)
    assert ours.dtype == torch.bfloat16
    assert ours.generation_config.eos_token_id == (0, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_found_as_in_a_model_of_transformers(tmp_path: Path, tied: bool) -> None:
    """Bug: `make bench` needs the input embedding, to count the bytes that a forward reads."""
    ours, theirs = ours_and_theirs(saved(tmp_path, tie_word_embeddings=tied), torch.float32)
    for model in (ours, theirs):
        tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (tables[0].data_ptr() == tables[1].data_ptr()) is tied
    assert torch.equal(ours.get_input_embeddings().weight, theirs.get_input_embeddings().weight)


def test_its_start_imports_no_transformers() -> None:
    """Law: starting the built-in pair skips this import, which takes three CPU seconds."""
    code = (
        "import sys; from engine.core import load_pair; from engine.config import EngineConfig\n"
        "load_pair(EngineConfig())\n"
        "print([m for m in ('transformers', 'torch._dynamo', 'sympy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"quantization_config": {}},
        {"something_new": 1},
        {"num_hidden_layers": 4},
        {"intermediate_size": 64},
        {"tie_word_embeddings": True},
        {"dtype": "bfloat16"},
        {"dtype": "float8"},
        {"num_attention_heads": 0},
        {"dtype": ["float32"]},
        {"dtype": {}},
        {"vocab_size": 10**18},
        {"head_dim": 10**15},
        {"intermediate_size": 10**19},
        {"num_hidden_layers": 10**9},
        {"attention_bias": 0},
        {"mlp_bias": 0},
        {"pretraining_tp": True},
        {"tie_word_embeddings": "false"},
        {"vocab_size": "128"},
        {"num_hidden_layers": 3.0},
        {"eos_token_id": "1"},
        {"eos_token_id": True},
        {"eos_token_id": [True]},
        {"rms_norm_eps": "1e-5"},
        {"pad_token_id": "x"},
        {"use_cache": "no"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
    ],
)
def test_other_llamas_are_left_to_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Law: no configuration field is ignored, and the weights are exactly those it describes. Bugs:
    a number given as a string was accepted, which transformers refuses, and one too large for torch
    gave a traceback."""
    folder = saved(tmp_path)
    assert read_llama(folder) is not None
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert read_llama(folder) is None


def test_whole_numbers_are_numbers(tmp_path: Path) -> None:
    """Law: JSON has a single number type, so the rotary base may be 10000 or 10000.0."""
    rope = {"rope_type": "default", "rope_theta": 10000}
    folder = saved(tmp_path)
    file = folder / "config.json"
    changes = {"rope_parameters": rope, "rms_norm_eps": 1, "eos_token_id": [2, 3]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    ours = read_llama(folder)
    assert ours is not None
    assert ours.config.eos_token_id == (2, 3)


def test_weights_that_are_not_in_order_are_left_to_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    file = folder / "model.safetensors"
    weights, content = load_file(file), file.read_bytes()
    save_file({**weights, "more": torch.zeros(1)}, file)
    assert read_llama(folder) is None
    file.write_bytes(content[:1000])
    assert read_llama(folder) is None
    file.unlink()
    assert read_llama(folder) is None
    file.write_bytes(content)
    (folder / "generation_config.json").write_text("{")
    assert read_llama(folder) is None
