"""Weights of twelve bits: that they are the weights, that products with them are those with
sixteen, and which models have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.cpu import weights as compiled_weights
from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_bfloat16 import pack as pack_words
from engine.cpu.kernels_bfloat16 import product_of_pairs
from engine.cpu.kernels_streams import PANEL
from engine.cpu.kernels_twelve import DoesNotFit, pack, product_of_twelve
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.memory import weights_of
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.support import tiny

pytestmark = pytest.mark.skipif(not HAS_TILES, reason="the processor has no AMX")

ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 49, 64, 70)
WIDE: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def with_exceptions(weight: Tensor, count: int) -> Tensor:
    """As many weights of the first panel have exponents of their own, from its first place to its
    last."""
    places = torch.linspace(0, PANEL * weight.shape[1] - 1, count).long()
    every = torch.linspace(-110, 110, count).round()
    weight[:PANEL].view(-1)[places] = (2.0**every).bfloat16()
    return weight


def sums(product: Any, rows: Tensor, weight: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    found = np.zeros((len(rows), weight.shape[0] * PANEL), np.float32)
    words = rows.contiguous().view(torch.int16).numpy().view(np.uint32)
    product(words, weight, found)
    return found


@pytest.mark.parametrize("inputs", [32, 64, 96, 352])
def test_a_product_is_to_the_bit_that_with_sixteen_bits(inputs: int) -> None:
    """Law: whatever the number of rows, with weights that are zero, weights that have another
    exponent than the rest, up to as many as there is room for, and outputs that fill no panel."""
    weight = with_exceptions(random(70, inputs), inputs // 8)
    weight[40:43] = 0.0
    weight[50, ::3] *= -0.0
    rows = random(max(ROWS), inputs)
    words, codes = pack_words(weight), pack(weight)
    for count in ROWS:
        expected = sums(product_of_pairs, rows[:count], words)
        np.testing.assert_array_equal(sums(product_of_twelve, rows[:count], codes), expected)
        assert np.isfinite(expected).all()


def test_every_weight_is_found_again() -> None:
    """Law: behind a row that is one at an input and zero elsewhere stands that input's weight."""
    weight = with_exceptions(random(96, 128), 16)
    found = sums(product_of_twelve, torch.eye(128).bfloat16(), pack(weight))
    np.testing.assert_array_equal(found.T, weight.float().numpy())


def test_it_takes_little_more_than_three_quarters() -> None:
    weight = random(256, 1024)
    assert pack(weight).nbytes < 0.77 * pack_words(weight).nbytes


def test_too_many_exponents_do_not_fit() -> None:
    """Law: one exception more than there is room for is refused, not left out."""
    pack(with_exceptions(random(32, 128), 16))
    with pytest.raises(DoesNotFit):
        pack((random(32, 128).float() * 2.0 ** torch.linspace(-40, 40, 128)).bfloat16())


def loaded(folder: Path, *, spread: float = 0.0) -> Any:
    """A random Llama whose weights have exponents so far apart."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **WIDE}))
    for layer in model.model.layers:
        scales = 2.0 ** torch.linspace(-spread, 0, 64)
        layer.self_attn.q_proj.weight.data *= scales
    path = tiny.save(model.bfloat16(), folder)
    return load_model(path, role="target", device="cpu", dtype="bfloat16")


def logits_of(model: Any) -> Tensor:
    runner = ModelRunner(model, KVCache(8, 4, "cpu"), "target")
    return runner.forward([Segment(list(range(3, 20)), 0, list(range(8)), 17)]).logits


@pytest.mark.parametrize(("spread", "fits"), [(0.0, True), (60.0, False)])
def test_a_large_target_has_them_where_they_fit(
    spread: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: its logits are the same to the bit either way; where they do not fit all bits are kept,
    and what is planned for the weights says which."""
    small = loaded(tmp_path, spread=spread)
    monkeypatch.setattr(compiled_weights, "SMALL", 1000)
    large = loaded(tmp_path, spread=spread)
    assert torch.equal(logits_of(small), logits_of(large))
    assert weights_of(small).note.endswith("a packed copy")
    assert weights_of(large).note.endswith("in twelve bits" if fits else "a packed copy")
    assert (large.compiled.packed_bytes < small.compiled.packed_bytes) == fits
