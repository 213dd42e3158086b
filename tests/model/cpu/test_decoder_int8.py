"""An int8 target in compiled code: half the bytes, nearly the same logits, on any processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.cpu import decoder, fused
from engine.errors import ModelError
from engine.lab.bench.costs import weight_bytes
from engine.model import loader
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.model.memory import weights_of
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.model.cpu.test_decoder_bfloat16 import SHAPES, WIDE, load

TOKENS = list(range(3, 20))


def logits_of(model: LoadedModel) -> Tensor:
    runner = ModelRunner(model, KVCache(8, 4, "cpu"), "any")
    return runner.forward([Segment(TOKENS, 0, list(range(8)), len(TOKENS))]).logits


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_nearly_exact_and_half_as_large(
    shape: dict[str, Any], has_pairs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: this holds with and without bfloat16 instructions. The memory plan and the benchmark's
    count of bytes read use the actual bytes."""
    for module in (decoder, fused):
        monkeypatch.setattr(module, "MULTIPLIES_PAIRS", has_pairs)
    small = load(tmp_path, kind="int8", **shape)
    assert small.compiled is not None
    assert (small.dtype, small.exact, small.compiled.bits) == (torch.bfloat16, True, 8)
    exact = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = exact(torch.tensor([TOKENS])).logits[0].float().detach()
    found = logits_of(small)
    error = float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    assert 0 < error < 0.03
    monkeypatch.setattr(decoder, "MULTIPLIES_PAIRS", True)
    whole = load(tmp_path, dtype="bfloat16", **shape)
    assert whole.compiled is not None
    assert small.compiled.packed_bytes < 0.6 * whole.compiled.packed_bytes
    assert weight_bytes(small) == small.compiled.packed_bytes
    assert "linear layers int8 and a packed copy in eight bits" in weights_of(small).note
    assert weights_of(small).size < weights_of(whole).size
    draft = load(tmp_path, role="draft", kind="int8", **shape)
    assert draft.compiled is not None
    assert torch.equal(logits_of(draft), found)


def test_unsupported_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: other shapes, biases, another precision, too many threads and models that fail the proof
    are refused; the message says why."""

    def reason(**more: Any) -> str:
        with pytest.raises(ModelError, match="as int8: ") as e:
            load(tmp_path, kind="int8", **{**WIDE, **more})
        return str(e.value)

    assert "compiled code runs Llamas only" in reason(head_dim=16)
    assert "compiled code does not support" in reason(attention_bias=True)
    assert "in bfloat16: set its dtype to 'auto' or 'bfloat16'" in reason(dtype="float32")
    monkeypatch.setattr(decoder, "SMALL", 1000)
    monkeypatch.setattr(decoder, "MOST_THREADS", 0)
    assert "threads compiled code would not run all" in reason()
    monkeypatch.undo()
    monkeypatch.setattr(loader, "is_proven", lambda *given: False)
    assert "compiled code does not support" in reason()
