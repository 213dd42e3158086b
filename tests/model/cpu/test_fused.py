"""The fused decoder computes what the model computes, with packed weights and without, and is not
offered for models where it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention.interface import Span
from engine.attention.sdpa import SdpaBackend
from engine.cpu.fused import (
    MOST_THREADS,
    FusedDecoder,
    fused_decoder,
    packed_decoder,
)
from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_rows import gate
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.cpu.weights import SMALL
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.proof import TOLERANCE, sample_tokens
from tests.support import tiny
from tests.support.whole_sequence import whole_sequence


def loaded_llama(folder: Path, **shape: Any) -> LoadedModel:
    config = LlamaConfig(**{**tiny.GROUPED, **shape})
    path = tiny.save(tiny.build(LlamaForCausalLM, config), folder)
    return load_model(path, role="target", device="cpu")


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
        {"max_position_embeddings": 1 << 16},  # too long for a table of rotary angles
    ],
    ids=["grouped heads", "tied", "scaled rope", "no table"],
)
@torch.inference_mode()
def test_it_equals_the_model(shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: logits equal the model's own up to the last bits, for one, few and many rows."""
    loaded = loaded_llama(tmp_path, **shape)
    model = loaded.model
    fused = FusedDecoder(model)
    door = ModuleCall(model)
    for count in (1, 3, 12):
        ids = torch.tensor([sample_tokens(model)[:count]])
        positions = torch.arange(count)[None]
        prepared = whole_sequence(loaded, count)
        expected = door(ids, positions, count, prepared())
        found = fused(ids, positions, count, prepared())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_gate_is_silu_at_any_size(rows: int) -> None:
    """Law: silu(gate) * up is right to the last bits, also where exp underflows or overflows, and
    finite inputs never give NaN."""
    gates = torch.cat([torch.linspace(-12, 12, 500), torch.tensor([-300.0, -87.0, 0.0, 300.0])])
    wide = torch.cat([gates.repeat(rows, 1), torch.linspace(-2, 2, 504 * rows).view(rows, -1)], 1)
    found = np.empty((rows, 504), np.float32)
    gate(wide.numpy(), found)
    gates, ups = wide.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gates) * ups
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6, atol=1e-35)


def test_weights_are_not_held_twice(tmp_path: Path) -> None:
    """Law: the model's own parameters are views of the packed ones, so changes reach both."""
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
def test_unsupported_models_are_not_fused(shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: a bias or another activation is never silently dropped; such models run layer by
    layer."""
    loaded = loaded_llama(tmp_path, **shape)
    assert fused_decoder(loaded.model) is None
    assert not isinstance(loaded.logits, FusedDecoder)


def test_other_families_are_not_fused(tmp_path: Path) -> None:
    """Law: Qwen 3 is not fused, because it normalises queries and keys."""
    loaded = load_model(tiny.save(tiny.FAMILIES["qwen3"](), tmp_path), role="target", device="cpu")
    assert fused_decoder(loaded.model) is None


needs_instruction = pytest.mark.skipif(
    not MULTIPLIES_PAIRS, reason="the processor has no AVX512_BF16"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_instruction)]


def load(folder: Path, dtype: torch.dtype, *, exact: bool = True, **shape: Any) -> LoadedModel:
    """Load a random Llama; `exact` rounds its weights to bfloat16, as published ones are."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **shape}))
    if exact:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
    name: Any = str(dtype).removeprefix("torch.")
    return load_model(tiny.save(model, folder), role="target", device="cpu", dtype=name)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Set one thread: more than `MOST_THREADS` would turn packing off."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True}, {"vocab_size": 130}],
    ids=["grouped heads", "tied", "padded vocabulary"],
)
@torch.inference_mode()
def test_packed_weights_equal_the_model(
    dtype: torch.dtype, shape: dict[str, Any], tmp_path: Path
) -> None:
    """Law: logits equal the model's own, to the last bits of float32 or the noise of bfloat16."""
    loaded = load(tmp_path, dtype, **shape)
    model, door = loaded.model, ModuleCall(loaded.model)
    packed = packed_decoder(model)
    assert packed is not None
    assert packed.packed_bytes > 0
    ids, positions = torch.tensor([sample_tokens(model)]), torch.arange(12)[None]
    keeps: tuple[int | torch.Tensor, ...] = (1, 12, torch.tensor([0, 5, 11]))
    for keep in keeps:
        prepared = whole_sequence(loaded)
        expected = door(ids, positions, keep, prepared()).float()
        found = packed(ids, positions, keep, prepared())
        assert found.shape == expected.shape
        allowed = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype] / 3
        assert float((found - expected).abs().max()) <= allowed * float(expected.abs().max())


@torch.inference_mode()
def test_packed_and_plain_products_agree(tmp_path: Path) -> None:
    """Law: beyond the rows that are packed, logits are the same up to the last bits."""
    loaded = load(tmp_path, torch.float32, max_position_embeddings=256)
    packed = packed_decoder(loaded.model)
    assert packed is not None
    ids, positions = torch.arange(100)[None], torch.arange(100)[None]
    cache = KVCache(32, 4, "cpu")
    plane = cache.add_plane("many", loaded.layers, loaded.dtype)
    backend, blocks = SdpaBackend(loaded.device), list(range(32))
    whole = packed(ids, positions, 100, backend.prepare(plane, [Span(0, 100, 0, blocks)]))
    for first in range(0, 100, 20):
        some = slice(first, first + 20)
        prepared = backend.prepare(plane, [Span(0, 20, first, blocks)])
        found = packed(ids[:, some], positions[:, some], 20, prepared)
        torch.testing.assert_close(found, whole[some], rtol=1e-4, atol=1e-4)


def test_it_is_offered_only_where_it_is_right_and_pays(tmp_path: Path) -> None:
    """Law: no packing for weights that bfloat16 would round, other dtypes, or many threads."""
    loaded = load(tmp_path / "exact", torch.float32)
    assert packed_decoder(loaded.model) is not None
    torch.set_num_threads(MOST_THREADS + 1)
    assert packed_decoder(loaded.model) is None
    torch.set_num_threads(1)
    rounded = load(tmp_path / "rounded", torch.float32, exact=False)
    assert packed_decoder(rounded.model) is None
    half = load(tmp_path / "half", torch.float16)
    assert packed_decoder(half.model) is None


@needs_instruction
def test_odd_widths_have_no_pairs(tmp_path: Path) -> None:
    loaded = load(tmp_path, torch.bfloat16, intermediate_size=77)
    assert packed_decoder(loaded.model) is None


@needs_instruction
@pytest.mark.parametrize(
    ("width", "threads", "dtype", "is_packed"),
    [
        (48, 1, "bfloat16", True),
        (48, 1, "auto", True),  # `auto` resolves to float32
        (64, 1, "bfloat16", False),
        (64, 2, "bfloat16", not HAS_TILES),
        (64, 2, "auto", not HAS_TILES),
        (48, 3, "bfloat16", False),
    ],
)
def test_it_runs_large_models_that_are_not_compiled(
    width: int, threads: int, dtype: Any, is_packed: bool, tmp_path: Path
) -> None:
    """Law: the fused decoder runs bfloat16 Llamas whose head size compiled attention lacks and, on
    two threads without AMX tiles, all of them; with `auto` these run in float32, also packed."""
    shape = {
        "hidden_size": 4 * width,
        "head_dim": width,
        "vocab_size": SMALL // (6 * width),
    }
    model: Any = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **shape}))
    folder = tiny.save(model.to(torch.bfloat16), tmp_path)
    torch.set_num_threads(threads)
    loaded = load_model(folder, role="target", device="cpu", dtype=dtype)
    assert (isinstance(loaded.logits, FusedDecoder) and loaded.logits.packed_bytes > 0) == is_packed
    assert (loaded.compiled is None) == (is_packed or threads > MOST_THREADS)
    assert loaded.dtype == (torch.float32 if dtype == "auto" and is_packed else torch.bfloat16)
