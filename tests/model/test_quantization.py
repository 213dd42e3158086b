"""Weights quantized by torchao: texts stay lossless, and memory shrinks. What needs a GPU is
refused here, and its settings are checked against torchao's classes."""

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

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ModelError
from engine.lab.bench.costs import weight_bytes
from engine.lab.bench.options import pair_config
from engine.messages import SamplingParams, Submit
from engine.model.loader import load_model
from engine.model.memory import weights_of
from engine.model.pair import load_pair
from engine.model.precision import is_quantized, quantization_arguments, unsupported
from tests.support import tiny

pytest.importorskip("torchao")

from torchao.quantization import Float8Tensor, PerRow

PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42]


def texts(target: str, draft: str, k: int) -> list[list[int]]:
    config: dict[str, Any] = {
        "target": {"path": target, "quantization": "int8"},
        "device": "cpu",
        "cache": {"num_blocks": 64},
        "speculation": {
            "proposer": {"path": draft, "quantization": "int8"},
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


def test_speculation_does_not_change_the_text(tiny_target: str, tiny_draft: str) -> None:
    """Law: for a quantized pair, too, K = 0 and K = 4 write the same text."""
    plain = texts(tiny_target, tiny_draft, 0)
    assert {len(text) for text in plain} == {20}
    assert texts(tiny_target, tiny_draft, 4) == plain


def test_the_benchmark_asks_for_it(tiny_target: str, tiny_draft: str) -> None:
    """Law: only the target is quantized; the draft is the same at any target precision."""
    parsed = Namespace(
        target=tiny_target,
        draft=tiny_draft,
        device="cpu",
        dtype="auto",
        quantization="int8",
        medusa=None,
        eagle=None,
    )
    pair = load_pair(pair_config(parsed))
    assert pair.draft is not None
    assert is_quantized(pair.target.model)
    assert not is_quantized(pair.draft.model)


def test_the_weights_are_smaller_and_nearly_the_same(tiny_target: str) -> None:
    """Law: the memory plan counts the actual bytes; each weight is off by less than a hundredth of
    its row's largest. Bug: `bench machine` counted a forward's reads as if unquantized."""
    whole = load_model(tiny_target, role="target", device="cpu")
    small = load_model(tiny_target, role="target", device="cpu", quantization="int8")
    assert is_quantized(small.model)
    assert not is_quantized(whole.model)
    assert weights_of(small).size < 0.7 * weights_of(whole).size
    assert "int8" in weights_of(small).note
    assert weight_bytes(small) < 0.7 * weight_bytes(whole)
    for name in ("q_proj", "o_proj"):
        ours, theirs = (
            getattr(m.model.model.layers[0].self_attn, name).weight for m in (small, whole)
        )
        limit = theirs.abs().amax(dim=1, keepdim=True) / 100
        assert bool(((ours.dequantize() - theirs).abs() <= limit).all())


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_what_needs_a_gpu_is_refused(kind: Any, tiny_target: str) -> None:
    with pytest.raises(ModelError, match=f"as {kind}: it needs a CUDA device; on a CPU use int8"):
        load_model(tiny_target, role="target", device="cpu", quantization=kind)


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.precision.find_spec", lambda name: None)
    reason = unsupported("int8", torch.device("cpu"), torch.float32)
    assert "torchao is not installed" in str(reason)


def on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("engine.model.precision.find_spec", lambda name: object())
    return torch.device("cuda:1")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("int8", {"granularity": PerRow()}),
        ("int4", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
        ("fp8", {"granularity": [PerRow(), PerRow()], "weight_dtype": torch.float8_e4m3fn}),
    ],
)
def test_settings_for_torchao(
    kind: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: transformers accepts it, weights are packed where they will lie, and torch's compiler
    settings stay unchanged. Bug: torchao set the compiler to tune every kernel on the device."""
    device = on_cuda(monkeypatch, (9, 0))
    found = quantization_arguments(kind, device, torch.bfloat16, "a model", None)
    assert found["device_map"] == {"": "cuda:1"}
    quant_type = found["quantization_config"].quant_type
    assert not quant_type.set_inductor_config
    assert {name: getattr(quant_type, name) for name in fields} == fields
    assert found["quantization_config"].to_dict()["quant_method"] == "torchao"


def test_a_row_of_zeros_stays_one_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a padding token's activations are zeros, and torchao divided them by a scale of 0: on
    an H200 its logits were NaN, and the request ended with an error."""
    from torchao.quantization.quantize_.workflows import Float8Tensor

    device, zeros = on_cuda(monkeypatch, (9, 0)), torch.zeros(2, 64, dtype=torch.bfloat16)
    found = quantization_arguments("fp8", device, torch.bfloat16, "a model", None)
    least = found["quantization_config"].quant_type.activation_value_lb
    kept = Float8Tensor.from_hp(zeros, granularity=PerRow(), hp_value_lb=least)
    assert torch.equal(kept.dequantize(), zeros)


def test_devices_and_precisions_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the message says in half a sentence what is allowed instead."""

    def reason(kind: Any, capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Any:
        return unsupported(kind, on_cuda(monkeypatch, capability), dtype)

    assert reason("fp8", (8, 9)) is reason("int4", (8, 0)) is reason("int8", (7, 0)) is None
    assert reason("int8", (9, 0), torch.float16) is None
    assert reason("fp8", (8, 6)) == "the device has no products of 8-bit floats; use int8 or int4"
    assert str(reason("int4", (7, 5))).endswith("compute capability 8.0 and later; use int8")
    for kind in ("fp8", "int4"):
        assert "the model is to run in torch.float16; use int8" in reason(kind, (9, 0), torch.half)


def test_fp8_weights_are_near_the_originals() -> None:
    """Law: in fp8, by torchao's own format as on a GPU, each row has a scale, and a weight is off
    by at most one part in 15 of itself plus one part in 2**15 of the row's largest."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight *= 10.0 ** torch.linspace(-4, 2, 64)[:, None]
    kept = Float8Tensor.from_hp(weight, torch.float8_e4m3fn, PerRow())
    wrong = (kept.dequantize().float() - weight.float()).abs()
    least = weight.float().abs().amax(1, keepdim=True) / 2**15
    assert bool((wrong <= weight.float().abs() / 15 + least).all())


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


def test_a_quantized_folder_is_left_alone(tiny_target: str) -> None:
    """Law: nothing is written to the model's folder."""
    before = sorted(path.name for path in Path(tiny_target).iterdir())
    load_model(tiny_target, role="target", device="cpu", quantization="int8")
    assert sorted(path.name for path in Path(tiny_target).iterdir()) == before


def test_unneeded_torchao_prints_nothing(tmp_path: Path) -> None:
    """Bug: where torchao is installed, every start printed its import warnings on stderr."""
    folder = tiny.save(tiny.qwen3(), tmp_path)  # a plain Llama does not even import it
    program = (
        "import sys; from engine.model.loader import load_model; "
        f"load_model({folder!r}, role='draft', device='cpu'); assert 'torchao' in sys.modules"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (0, "")


@pytest.mark.parametrize(
    "module", ["engine.demo.train", "engine.lab.synthetic", "engine.lab.bench"]
)
def test_only_the_mistake_is_reported(module: str) -> None:
    """Bug: four lines of import warnings stood before the error."""
    command = [sys.executable, "-m", module, "--unheard-of"]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode == 2
    assert child.stderr.count("\n") == 1
