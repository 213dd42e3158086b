"""The fused decoder computes what the model computes, and is not offered where it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.cpu.fused import FusedDecoder, fused_decoder
from engine.cpu.kernels_rows import gate
from engine.model.call import front_door
from engine.model.loaded import LoadedModel
from engine.model.loader import load_model
from engine.model.proof import sample_tokens, whole_sequence
from tests.support import tiny


def loaded_llama(folder: Path, **shape: Any) -> LoadedModel:
    config = LlamaConfig(**{**tiny.GROUPED, **shape})
    path = tiny.save(tiny.build(LlamaForCausalLM, config), folder)
    return load_model(path, role="target", device="cpu")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
        {"max_position_embeddings": 1 << 16},  # too long for a table of angles
    ],
    ids=["grouped heads", "tied", "scaled rope", "no table"],
)
@torch.inference_mode()
def test_it_equals_the_model(turned: bool, shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: same logits as the front door to the last bits, with weights laid out either way, for
    one row, few and many."""
    loaded = loaded_llama(tmp_path, **shape)
    model = loaded.model
    fused = FusedDecoder(model, turned=turned)
    door, prepared = front_door(model), whole_sequence(loaded.layers, model)
    for count in (1, 3, 12):
        ids = torch.tensor([sample_tokens(model)[:count]])
        positions = torch.arange(count)[None]
        with_spans = prepared
        if count != 12:
            with_spans = short_attention(loaded, count)
        expected = door(ids, positions, count, with_spans())
        found = fused(ids, positions, count, with_spans())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [2, 5])
def test_the_gate_is_silu_at_any_size(columns: int) -> None:
    """Law: silu(gate) * up to the last bits, beyond where exp underflows and overflows too,
    and no number becomes none."""
    gates = torch.cat([torch.linspace(-12, 12, 500), torch.tensor([-300.0, -87.0, 0.0, 300.0])])
    gates, ups = gates.repeat(columns, 1).T, torch.linspace(-2, 2, 504 * columns).view(504, columns)
    wide = torch.cat([gates, ups]).contiguous().numpy()
    found = np.empty((columns, 504), np.float32)
    gate(wide, np.empty(504 * columns, np.float32), found)
    expected = (torch.nn.functional.silu(gates.double()) * ups.double()).T
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=1e-35)


def short_attention(loaded: LoadedModel, count: int) -> Any:
    """Attention for `count` tokens as one sequence, over a cache of its own."""
    from engine.attention.interface import Span
    from engine.attention.sdpa import SdpaBackend
    from engine.model.kv_cache import KVCache

    cache = KVCache(4, 4, "cpu")
    plane = cache.add_plane("short", loaded.layers, loaded.dtype)
    return lambda: SdpaBackend(loaded.device).prepare(plane, [Span(0, count, 0, [0, 1, 2, 3])])


def test_weights_are_not_held_twice(tmp_path: Path) -> None:
    """Law: the model's own parameters are views of the packed ones, and a change reaches both."""
    loaded = loaded_llama(tmp_path)
    assert isinstance(loaded.logits, FusedDecoder)
    attention = loaded.model.base_model.layers[0].self_attn
    storages = {
        getattr(attention, name).weight.untyped_storage().data_ptr()
        for name in ("q_proj", "k_proj", "v_proj")
    }
    assert len(storages) == 1


@pytest.mark.parametrize(
    "shape",
    [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}],
    ids=["attention bias", "mlp bias", "gelu"],
)
def test_what_is_not_plain_is_not_fused(shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: a bias or another activation is never dropped on the way; such models go layer by
    layer."""
    loaded = loaded_llama(tmp_path, **shape)
    assert fused_decoder(loaded.model) is None
    assert not isinstance(loaded.logits, FusedDecoder)


def test_other_families_are_not_fused(tmp_path: Path) -> None:
    """Law: Qwen 3 normalises its queries and keys, which the fused decoder does not."""
    loaded = load_model(tiny.save(tiny.FAMILIES["qwen3"](), tmp_path), role="target", device="cpu")
    assert fused_decoder(loaded.model) is None
