"""Which models have weights of eight or twelve bits, and what their logits are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import DraftModelConfig, DraftQuantizationName
from engine.cpu import weights
from engine.cpu.jit import HAS_TILES
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.memory import weights_of
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.support import tiny

pytestmark = pytest.mark.skipif(
    not HAS_TILES, reason="the processor has no AMX, or does not grant it"
)
WIDE: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}


def draft_of(folder: Path, quantization: DraftQuantizationName, **shape: Any) -> Any:
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **WIDE, **shape}))
    path = tiny.save(model.bfloat16(), folder)
    return load_model(path, role="draft", device="cpu", dtype="bfloat16", quantization=quantization)


def test_a_draft_has_few_bits_by_default(tmp_path: Path) -> None:
    """Law: `auto`, the default of drafts, halves the packed copy; `none` keeps all bits. The logits
    of the two are close but not equal."""
    assert DraftModelConfig().quantization == "auto"
    coded, whole = draft_of(tmp_path, "auto"), draft_of(tmp_path, "none")
    assert coded.compiled.packed_bytes < 0.6 * whole.compiled.packed_bytes
    assert weights_of(coded).size < weights_of(whole).size
    assert weights_of(coded).note.endswith("a packed copy in eight bits")
    assert weights_of(whole).note.endswith("a packed copy")
    found, expected = logits_of(coded), logits_of(whole)
    worst = float((found - expected).abs().max() / expected.abs().max())
    assert 0.0 < worst < 0.1


@pytest.mark.parametrize("shape", [{"hidden_size": 52}, {"intermediate_size": 48}])
def test_partial_tiles_keep_all_bits(shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: a draft whose shapes do not fit whole tiles keeps all bits and still runs."""
    coded, whole = draft_of(tmp_path, "auto", **shape), draft_of(tmp_path, "none", **shape)
    assert coded.compiled.packed_bytes == whole.compiled.packed_bytes
    assert torch.equal(logits_of(coded), logits_of(whole))


def target_of(folder: Path, *, spread: float = 0.0) -> Any:
    """Load a random Llama whose weights have exponents up to `spread` apart."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **WIDE}))
    for layer in model.model.layers:
        scales = 2.0 ** torch.linspace(-spread, 0, 64)
        layer.self_attn.q_proj.weight.data *= scales
    path = tiny.save(model.bfloat16(), folder)
    return load_model(path, role="target", device="cpu", dtype="bfloat16")


def logits_of(model: Any) -> Tensor:
    runner = ModelRunner(model, KVCache(8, 4, "cpu"), "any")
    return runner.forward([Segment(list(range(3, 20)), 0, list(range(8)), 17)]).logits


@pytest.mark.parametrize(("spread", "fits"), [(0.0, True), (60.0, False)])
def test_a_large_target_has_twelve_bits_where_they_fit(
    spread: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: logits are bit-identical with either format. Where twelve bits cannot hold the weights,
    all bits are kept, and the memory plan counts accordingly."""
    small = target_of(tmp_path, spread=spread)
    monkeypatch.setattr(weights, "SMALL", 1000)
    large = target_of(tmp_path, spread=spread)
    assert torch.equal(logits_of(small), logits_of(large))
    assert weights_of(small).note.endswith("a packed copy")
    assert weights_of(large).note.endswith("in twelve bits" if fits else "a packed copy")
    assert (large.compiled.packed_bytes < small.compiled.packed_bytes) == fits
