"""The target's own first layers as a draft: what they compute, and that no weight is held twice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.errors import ModelError
from engine.model.early_exit import best_exit, early_exit
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.model.loader import load_model
from engine.model.memory import weights_of
from engine.model.pair import load_pair
from engine.model.proof import sample_tokens
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.support import tiny


def load(path: str | Path, **more: Any) -> LoadedModel:
    return load_model(str(path), role="target", device="cpu", **more)


def logits(model: LoadedModel) -> Tensor:
    runner = ModelRunner(model, KVCache(8, 4, "cpu"), "plane")
    tokens = sample_tokens(model.model)
    return runner.forward([Segment(tokens, 0, [3, 1, 4], len(tokens))]).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_it_computes_what_a_model_of_those_layers_computes(family: str, tmp_path: Path) -> None:
    """Law: in every family, the draft equals the model cut to its first layers, and the target is
    unchanged."""
    model = tiny.FAMILIES[family]()
    target = load(tiny.save(model, tmp_path / "target"))
    before = logits(target)
    draft = early_exit(target, 2)
    shape = {**tiny.draft_of(model, 2).config.to_dict()}
    assert shape["num_hidden_layers"] == len(draft.layers) == 2
    other = load(tiny.save(tiny.draft_of(model, 2), tmp_path / "other"))
    torch.testing.assert_close(logits(draft), logits(other), atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(target), before)
    assert (draft.role, draft.vocab_size) == ("draft", target.vocab_size)


def test_no_weight_is_held_twice(tiny_target: str) -> None:
    """Law: all parameters are the target's own, and the memory plan counts no weights."""
    target = load(tiny_target)
    draft = early_exit(target, 1)
    own = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert {parameter.data_ptr() for parameter in draft.model.parameters()} < own
    assert weights_of(draft).size == 0 < weights_of(target).size


@pytest.mark.skipif(not MULTIPLIES_PAIRS, reason="the processor has no AVX512_BF16")
def test_packed_weights_are_shared() -> None:
    """Law: compiled code of the first layers reads the target's packed weights."""
    target = load(Path("engine/demo/target"))
    draft = early_exit(target, 3)
    assert target.compiled is not None
    assert draft.compiled is not None
    for whole, part in zip(target.compiled._weights, draft.compiled._weights, strict=True):
        assert np.shares_memory(whole, part)
    assert len(draft.compiled._weights[1]) == 3
    assert ModelRunner(draft, KVCache(8, 4, "cpu"), "draft").draws_chains(1)


def test_the_number_of_layers_is_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Law: if the later layers of a model add nothing, the cheapest of the equally good exits is
    taken, and not the first exit, which agrees rarely. Found by CI on a busy machine: with measured
    times, the same layers could take longer than more of them."""
    model = tiny.llama({**tiny.GROUPED, "num_hidden_layers": 16})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                layer = int(name.split(".")[2])
                parameter.mul_(0.0 if layer >= 3 else 4.0)
    target = load(tiny.save(model, tmp_path))
    with caplog.at_level(logging.INFO):
        draft = best_exit(target, 4, timed=lambda model, rows: len(model.layers) + 0.01 * rows)
    assert len(draft.layers) == 3
    assert "first 3 of 16 layers: acceptance 100 %" in caplog.text


@pytest.mark.parametrize(("layers", "message"), [(3, "it has 3, and"), (40, "layers is 40")])
def test_more_layers_than_the_target_has(layers: int, message: str, tiny_target: str) -> None:
    """Bad input: refused at start, naming the key."""
    proposer = {"kind": "self", "layers": layers}
    config = {"target": {"path": tiny_target}, "speculation": {"proposer": proposer}}
    with pytest.raises(ModelError, match=message) as refused:
        load_pair(EngineConfig.model_validate({**config, "device": "cpu"}))
    assert "speculation.proposer.layers" in str(refused.value)


def test_a_model_without_a_list_of_layers(tiny_target: str) -> None:
    """Bad input: the error names a family whose layers cannot be cut."""
    target = load(tiny_target)
    target.model.model.layers = torch.nn.Sequential(*target.model.model.layers)
    with pytest.raises(ModelError, match="a Llama has no list of decoder layers"):
        early_exit(target, 1)
