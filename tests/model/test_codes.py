"""Weights of eight bits: what they stand for, products with them, and which drafts have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import DraftModelConfig, DraftQuantizationName
from engine.cpu.kernels_codes import pack, product_of_codes, suits
from engine.cpu.kernels_streams import PANEL
from engine.cpu.vectors import multiplies_pairs
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.memory import weights_of
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.support import tiny

needs_codes = pytest.mark.skipif(
    not (multiplies_pairs() and suits(32)), reason="this processor reads sixteen bits as fast"
)
EIGHT: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}


def decoded(codes: npt.NDArray[np.uint16], outputs: int) -> Tensor:
    """The weights that packed codes stand for `[outputs, in]`, by the format's definition."""
    panels, rows, _ = codes.shape
    pairs = np.ascontiguousarray(codes[:, :-2].transpose(0, 2, 1)).reshape(-1, rows - 2)
    found = torch.from_numpy(pairs.view(np.uint8).astype(np.int64))
    bases = np.ascontiguousarray(codes[:, -2:]).reshape(panels, -1).view(np.uint32).reshape(-1)
    lowest = torch.from_numpy((bases >> 16 >> 7).astype(np.int64))[:, None] - 127
    size = 2.0 ** (lowest + found % 128 // 16) * (1 + found % 16 / 16.0)
    return torch.where(found >= 128, -size, size)[:outputs].double()


def as_words(rows: Tensor) -> npt.NDArray[np.uint32]:
    return rows.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint32)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_weight_is_kept_to_one_part_in_32_unless_it_is_small_beside_its_output() -> None:
    """Law: of the format. The largest weight of each output sets its exponents, whatever the other
    outputs' are; what is below their range becomes the least of it."""
    weight = random(70, 96) * 10.0 ** torch.linspace(-6, 3, 70)[:, None]
    weight[3] *= 0
    weight[5, 7], weight[6, 8] = -2.0, 3.999
    found, weight = decoded(pack(weight), 70), weight.double()
    least = 2.0 ** (weight.abs().amax(1, keepdim=True).log2().floor() - 7)
    wrong = (found - weight).abs()
    other = torch.arange(70) != 3
    assert (wrong <= torch.maximum(weight.abs() / 31, least))[other].all()
    assert (found.sign() == weight.sign())[weight != 0].all()
    assert found[3].abs().max() < 1e-30
    assert float(wrong[other].pow(2).sum() / weight.pow(2).sum()) < 0.02**2


def test_what_is_zero_does_not_add_up() -> None:
    """Law: there is no code for zero, so zeros are the least there is, with signs in turns."""
    weight = torch.zeros(32, 64)
    weight[:, 0] = 1.0
    assert float(decoded(pack(weight), 32)[:, 2:].sum(1).abs().max()) == 0.0


@needs_codes
@pytest.mark.parametrize("inputs", [32, 64, 96, 256])
def test_a_product_is_that_of_the_weights_that_the_codes_stand_for(inputs: int) -> None:
    """Law: to the rounding of float32 sums, for any number of rows, and a row is the same to the
    bit in any company."""
    weight, rows = random(70, inputs), random(50, inputs).bfloat16()
    codes = pack(weight)
    expected = rows.double() @ decoded(codes, 70).T
    alone = np.zeros((50, len(codes) * PANEL), np.float32)
    for row in range(50):
        product_of_codes(as_words(rows[row : row + 1]), codes, alone[row : row + 1])
    np.testing.assert_allclose(alone[:, :70], expected.numpy(), rtol=1e-5, atol=1e-5)
    assert not alone[:, 70:].any()
    for count in (2, 7, 15, 16, 17, 31, 32, 33, 48, 50):
        together = np.zeros((count, alone.shape[1]), np.float32)
        product_of_codes(as_words(rows[:count]), codes, together)
        np.testing.assert_array_equal(together, alone[:count])


def draft_of(folder: Path, quantization: DraftQuantizationName, **shape: Any) -> Any:
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **EIGHT, **shape}))
    path = tiny.save(model.bfloat16(), folder)
    return load_model(path, role="draft", device="cpu", dtype="bfloat16", quantization=quantization)


def logits_of(loaded: Any) -> Tensor:
    runner = ModelRunner(loaded, KVCache(8, 4, "cpu"), "draft")
    return runner.forward([Segment(list(range(3, 20)), 0, list(range(8)), 17)]).logits


@needs_codes
def test_a_draft_has_them_unless_it_is_told_not_to(tmp_path: Path) -> None:
    """Law: `auto`, the default of drafts, halves the packed copy; `none` keeps all bits. What the
    one computes is near what the other does, and not the same."""
    assert DraftModelConfig().quantization == "auto"
    coded, whole = draft_of(tmp_path, "auto"), draft_of(tmp_path, "none")
    assert coded.compiled.packed_bytes < 0.6 * whole.compiled.packed_bytes
    assert weights_of(coded).size < weights_of(whole).size
    assert weights_of(coded).note.endswith("a packed copy in eight bits")
    assert weights_of(whole).note.endswith("a packed copy")
    found, expected = logits_of(coded), logits_of(whole)
    worst = float((found - expected).abs().max() / expected.abs().max())
    assert 0.0 < worst < 0.1


@needs_codes
@pytest.mark.parametrize("shape", [{"hidden_size": 52}, {"intermediate_size": 48}])
def test_widths_that_are_no_whole_tiles_keep_all_bits(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    """Law: a draft that cannot be kept in eight bits runs as before."""
    coded, whole = draft_of(tmp_path, "auto", **shape), draft_of(tmp_path, "none", **shape)
    assert coded.compiled.packed_bytes == whole.compiled.packed_bytes
    assert torch.equal(logits_of(coded), logits_of(whole))
