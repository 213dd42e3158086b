"""Packed products: what torch computes, to the bit whatever the company, and only where offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention.interface import Variation
from engine.attention.sdpa import FOLDED_ROWS, attention
from engine.cpu import kernels_bfloat16
from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_rows import gate_rows
from engine.cpu.packed import MOST_THREADS, SMALLEST, PackedDecoder, packed_decoder
from engine.cpu.vectors import multiplies_pairs
from engine.model.call import front_door
from engine.model.loaded import LoadedModel
from engine.model.loader import load_model
from engine.model.proof import TOLERANCE, sample_tokens, whole_sequence
from tests.support import tiny

needs_instruction = pytest.mark.skipif(
    not multiplies_pairs(), reason="the processor has no AVX512_BF16"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_instruction)]


def load(folder: Path, dtype: torch.dtype, *, exact: bool = True, **shape: Any) -> LoadedModel:
    """A random Llama; `exact` rounds its weights to bfloat16, as published ones are."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **shape}))
    if exact:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
    name: Any = str(dtype).removeprefix("torch.")
    return load_model(tiny.save(model, folder), role="target", device="cpu", dtype=name)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """More threads than `MOST_THREADS` would turn packing off."""
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
def test_it_equals_the_model(dtype: torch.dtype, shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: the front door's logits, to the last bits of float32, within bfloat16's own noise."""
    loaded = load(tmp_path, dtype, **shape)
    model, door = loaded.model, front_door(loaded.model)
    packed = packed_decoder(model, door, smallest=0)
    assert isinstance(packed, PackedDecoder)
    ids, positions = torch.tensor([sample_tokens(model)]), torch.arange(12)[None]
    keeps: tuple[int | torch.Tensor, ...] = (1, 12, torch.tensor([0, 5, 11]))
    for keep in keeps:
        prepared = whole_sequence(loaded.layers, model)
        expected = door(ids, positions, keep, prepared()).float()
        found = packed(ids, positions, keep, prepared())
        assert found.shape == expected.shape
        allowed = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype] / 3
        assert float((found - expected).abs().max()) <= allowed * float(expected.abs().max())


@torch.inference_mode()
def test_many_rows_go_the_plain_way(tmp_path: Path) -> None:
    loaded = load(tmp_path, torch.float32)
    answer = torch.zeros(1, 1)
    packed = packed_decoder(loaded.model, lambda *arguments: answer, smallest=0)
    assert packed is not None
    ids = torch.zeros(1, 65, dtype=torch.int64)
    prepared = whole_sequence(loaded.layers, loaded.model)()
    assert packed(ids, ids, 1, prepared) is answer


def test_it_is_offered_only_where_it_is_right_and_pays(tmp_path: Path) -> None:
    """Not for weights that bfloat16 would round, small models, other dtypes, or many threads."""
    loaded = load(tmp_path / "exact", torch.float32)
    door = front_door(loaded.model)
    assert packed_decoder(loaded.model, door) is None
    assert packed_decoder(loaded.model, door, smallest=0) is not None
    torch.set_num_threads(MOST_THREADS + 1)
    assert packed_decoder(loaded.model, door, smallest=0) is None
    torch.set_num_threads(1)
    rounded = load(tmp_path / "rounded", torch.float32, exact=False)
    assert packed_decoder(rounded.model, door, smallest=0) is None
    half = load(tmp_path / "half", torch.float16)
    assert packed_decoder(half.model, door, smallest=0) is None


@needs_instruction
def test_odd_widths_have_no_pairs(tmp_path: Path) -> None:
    loaded = load(tmp_path, torch.bfloat16, intermediate_size=77)
    assert packed_decoder(loaded.model, front_door(loaded.model), smallest=0) is None


@needs_instruction
@pytest.mark.parametrize(
    ("width", "threads", "dtype", "is_packed"),
    [
        (48, 1, "bfloat16", True),
        (48, 1, "auto", True),  # in float32
        (64, 1, "bfloat16", False),
        (64, 2, "bfloat16", not HAS_TILES),
        (64, 2, "auto", not HAS_TILES),
        (48, 3, "bfloat16", False),
    ],
)
def test_it_runs_what_is_large_and_not_one_compiled_call(
    width: int, threads: int, dtype: Any, is_packed: bool, tmp_path: Path
) -> None:
    """Law: of Llamas in bfloat16 those with heads of other sizes than compiled attention knows, and
    on two threads without tiles all; `auto` has both in float32, packed as well."""
    shape = {"hidden_size": 4 * width, "head_dim": width, "vocab_size": SMALLEST // (6 * width)}
    model: Any = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **shape}))
    folder = tiny.save(model.to(torch.bfloat16), tmp_path)
    torch.set_num_threads(threads)
    loaded = load_model(folder, role="target", device="cpu", dtype=dtype)
    assert isinstance(loaded.logits, PackedDecoder) == is_packed
    assert (loaded.compiled is None) == (is_packed or threads > MOST_THREADS)
    assert loaded.dtype == (torch.float32 if dtype == "auto" and is_packed else torch.bfloat16)


@needs_instruction
@pytest.mark.parametrize("inputs", [52, 96])  # without whole tiles, and with
@pytest.mark.parametrize("outputs", [1, 31, 32, 100])
def test_a_bfloat16_product_is_right_and_the_same_in_any_company(outputs: int, inputs: int) -> None:
    """Law: a row's bits do not depend on how many rows share the product. Rounding is torch's."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    rows = torch.randn(35, inputs, generator=generator)
    words = kernels_bfloat16.pack(weight)

    def product(some: torch.Tensor) -> torch.Tensor:
        space = np.empty((len(some), inputs // 2), dtype=np.uint32)
        out = np.full((len(some), kernels_bfloat16.padded(outputs)), np.nan, dtype=np.float32)
        kernels_bfloat16.product(some.numpy(), space, words, out)
        pairs = torch.from_numpy(space.view(np.int16)).view(torch.bfloat16)
        assert torch.equal(pairs, some.bfloat16())
        return torch.from_numpy(out)[:, :outputs]

    together = product(rows)
    expected = rows.bfloat16().double() @ weight.double().t()
    assert torch.allclose(together.double(), expected, rtol=1e-5, atol=1e-4)
    for count in (0, *range(1, 12), 16, 17, 28):
        for first in (0, 7):
            some = rows[first : first + count].contiguous()
            assert torch.equal(product(some), together[first : first + count])


def test_the_gate_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 64, generator=generator) * 10
    out = np.empty((5, 24), dtype=np.float32)
    gate_rows(wide.numpy(), out)
    expected = torch.nn.functional.silu(wide[:, :24]) * wide[:, 24:48]
    assert torch.allclose(torch.from_numpy(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, FOLDED_ROWS])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_folded_heads_attend_as_grouped_ones(
    dtype: torch.dtype, rows: int, masked: bool, batch: int
) -> None:
    """Heads that share keys become rows of one head; the mask goes along with them."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    query, key, value = random(batch, 6, rows, 8), random(batch, 2, 20, 8), random(batch, 2, 20, 8)
    bias = None
    if masked:
        hidden = torch.rand(batch, 1, rows, 20, generator=generator) < 0.3
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    found = attention(query, key, value, bias, False, Variation(None, None, None, None))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, enable_gqa=True
    ).transpose(1, 2)
    assert found.shape == expected.shape
    allowed = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(found.float(), expected.float(), rtol=allowed, atol=allowed)
