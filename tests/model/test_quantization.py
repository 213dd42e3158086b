"""Quantized weights on a CPU: the settings reach the model, and what cannot be is refused. Compiled
code that runs int8: tests/model/cpu/test_decoder_int8.py; on a GPU: test_fused_layers.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import BUILTIN, EngineConfig, model_folder
from engine.core import Engine
from engine.errors import ModelError
from engine.lab.bench.options import pair_config
from engine.messages import SamplingParams, Submit
from engine.model.loader import load_model
from engine.model.pair import load_pair
from engine.model.precision import placement

PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42]


def texts(k: int) -> list[list[int]]:
    config: dict[str, Any] = {
        "target": {"quantization": "int8"},
        "device": "cpu",
        "cache": {"num_blocks": 64},
        "speculation": {
            "proposer": {"quantization": "int8"},
            "controller": {"kind": "fixed", "k": k},
        },
    }
    engine = Engine(EngineConfig.model_validate(config))
    found: list[list[int]] = [[], [], []]
    for i in range(3):
        params = SamplingParams(seed=i, max_tokens=20, temperature=i / 2, ignore_eos=True)
        engine.add(Submit(str(i), PROMPT[i:], params, 0.0))
    while engine.has_work:
        for output in engine.step().items:
            found[int(output.id)] += output.tokens
    return found


def test_speculation_does_not_change_the_text() -> None:
    """Law: for a quantized pair, too, K = 0 and K = 4 write the same text."""
    plain = texts(0)
    assert {len(text) for text in plain} == {20}
    assert texts(4) == plain


def test_the_benchmark_asks_for_it() -> None:
    """Law: only the target is quantized; the draft is the same at any target precision."""
    parsed = Namespace(
        target="demo",
        draft="demo",
        device="cpu",
        dtype="auto",
        quantization="int8",
        medusa=None,
        eagle=None,
    )
    pair = load_pair(pair_config(parsed))
    assert pair.draft is not None
    assert (pair.target.quantization, pair.draft.quantization) == ("int8", "none")


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_what_needs_a_gpu_is_refused(kind: Any, tiny_target: str) -> None:
    """Law: int8 is named where it would be possible."""
    builtin = model_folder(BUILTIN, "target")
    for path, end in ((builtin, "; on a CPU use int8"), (tiny_target, "")):
        with pytest.raises(ModelError, match=f"as {kind}: it needs a CUDA device{end}$"):
            load_model(path, role="target", device="cpu", quantization=kind)


def test_a_draft_is_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    """Bug: a quantization that the draft cannot have was refused only after a target of gigabytes
    was loaded."""
    target = tmp_path / "target"
    shutil.copytree(model_folder(BUILTIN, "target"), target)
    (target / "model.safetensors").write_bytes(b"no weights")
    proposer = {"kind": "draft_model", "path": BUILTIN, "quantization": "int4"}
    models = {"target": {"path": str(target)}, "speculation": {"proposer": proposer}}
    with pytest.raises(ModelError, match="the draft model .* as int4: it needs a CUDA device"):
        load_pair(EngineConfig.model_validate(models | {"device": "cpu"}))


def stored(folder: Path, target: str, method: str) -> str:
    """Copy a target to a folder whose configuration says that it is quantised by `method`."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_stored_quantised_models_are_named(tiny_target: str, tmp_path: Path) -> None:
    """Law: a stored quantised model is not quantised again; if transformers cannot load it here,
    the refusal gives its method and what transformers says."""
    path = stored(tmp_path / "gptq", tiny_target, "gptq")
    for kind in ("int8", "none"):
        with pytest.raises(ModelError, match="stored in gptq") as e:
            load_model(path, role="target", device="cpu", quantization=kind)
        assert ("already: set its quantization to 'none'" in str(e.value)) == (kind == "int8")


def test_stored_weights_are_packed_where_they_will_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: with accelerate, transformers loads a quantised checkpoint on the device itself."""
    monkeypatch.setattr("engine.model.precision.find_spec", lambda name: object())
    assert placement(torch.device("cuda:1")) == {"device_map": {"": "cuda:1"}}
    monkeypatch.setattr("engine.model.precision.find_spec", lambda name: None)
    assert placement(torch.device("cuda:1")) == placement(torch.device("cpu")) == {}


@pytest.mark.parametrize(
    "module", ["engine.lab.demo.train", "engine.lab.synthetic", "engine.lab.bench"]
)
def test_only_the_mistake_is_reported(module: str) -> None:
    """Bug: four lines of import warnings stood before the error."""
    command = [sys.executable, "-m", module, "--unheard-of"]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 2
    assert child.stderr.count("\n") == 1
