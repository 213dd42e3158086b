"""Fused layers on a CUDA device."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.nn import functional

from engine.attention.interface import Span
from engine.attention.sdpa import SdpaBackend
from engine.config import DTypeName, QuantizationName
from engine.model.kv_cache import KVCache
from engine.model.loaded import ModuleCall
from engine.model.loader import load_model
from engine.model.proof import OWN_TOLERANCE
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.support.cuda import ON_CUDA

pytest.importorskip("triton")

from engine.model import fused_layers, triton_products
from engine.model.triton_layers import rotated
from engine.model.triton_products import WEIGHTS, Product, dequantized, quantize

pytestmark = ON_CUDA


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_fused_layers_serve_and_equal_the_model(tiny_target: str, dtype: DTypeName) -> None:
    """Law: they pass the loader's proof, and equal the model on more rows than it used."""
    model = load_model(tiny_target, role="target", device="cuda", dtype=dtype)
    plane = KVCache(20, 16, model.device).add_plane("all", model.layers, model.dtype)
    ids = torch.arange(200, device="cuda")[None] % 100 + 4
    places = torch.arange(200, device="cuda")[None]
    found = []
    for call, fused in ((ModuleCall(model.model), False), (model.logits, True)):
        prepared = SdpaBackend(model.device).prepare(plane, [Span(0, 200, 0, range(20))])
        with patch.object(fused_layers, "rotated", Mock(wraps=rotated)) as used:
            found.append(call(ids, places, 200, prepared))
        assert used.called == fused
    worst = (found[1] - found[0]).abs().max() / found[0].abs().max()
    assert worst.item() <= OWN_TOLERANCE[model.dtype]


COUNTS = (1, 2, 5, 16, 17, 32, 33, 64, 65, 128, 300)


@pytest.mark.parametrize("kind", ["none", *WEIGHTS])
@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 4096), (14336, 4096), (4160, 8)])
@torch.inference_mode()
def test_a_product_gives_a_row_its_bits(shape: tuple[int, int], kind: QuantizationName) -> None:
    """Law: gated or not, a bfloat16 row's bits depend on neither the number of rows nor the run;
    nor do they with quantized weights, where torch multiplies the dequantized ones."""
    generator = torch.Generator("cuda").manual_seed(0)
    linear = torch.nn.Linear(*shape, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(300, shape[0], device="cuda", generator=generator).bfloat16()
    weight = linear.weight.float()
    if kind != "none":
        quantize(linear, linear.weight.device, kind)
        weight = dequantized(linear, torch.float32)
    ours = Product(linear, 1 << 62)
    found, gated = ours(rows), ours.gated(rows, 0)
    expected = functional.linear(rows.float(), weight, linear.bias.float())
    assert (found - expected).norm() <= 4e-3 * expected.norm()
    for count in COUNTS * 3:
        assert torch.equal(ours(rows[:count]), found[:count])
        assert torch.equal(ours.gated(rows[:count], 0), gated[:count])


@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_our_products_serve_quantized_weights(
    tiny_target: str, kind: QuantizationName, dtype: DTypeName
) -> None:
    """Law: all layers hold words of quantized weights, and our kernel multiplies all rows."""
    model = load_model(tiny_target, role="target", device="cuda", dtype=dtype, quantization=kind)
    linear = [m for m in model.model.base_model.modules() if type(m) is torch.nn.Linear]
    assert {part.weight.dtype for part in linear} == {torch.int16}
    runner = ModelRunner(model, KVCache(80, 16, model.device), "target")
    tokens = [(7 * i) % 120 + 4 for i in range(70)]
    with patch.object(triton_products, "dequantized", None):  # torch must not be called
        found = runner.forward([Segment(tokens, 0, [1, 2, 3, 4, 5], 3)]).logits
    assert found.isfinite().all()


def test_a_steady_model_gives_a_row_its_bits(tiny_target: str) -> None:
    """Law: in bfloat16 a row's bits are equal in a prompt, in its tail in a batch, and decoded."""
    how: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True}
    model = load_model(tiny_target, role="target", **how)
    runner = ModelRunner(model, KVCache(80, 16, model.device), "target")
    tokens = [(7 * i) % 120 + 4 for i in range(70)]
    whole = runner.forward([Segment(tokens, 0, [1, 2, 3, 4, 5], 3)]).logits
    blocks = [9, 8, 7, 6, 10]
    runner.forward([Segment(tokens[:67], 0, blocks, 1)])
    others = [Segment(tokens[: 9 + i], 0, [20 + 2 * i, 21 + 2 * i], 1) for i in range(20)]
    among = runner.forward([*others, Segment(tokens[67:], 67, blocks, 3)]).logits[-3:]
    assert torch.equal(among, whole)
    alone = [runner.forward([Segment([tokens[i]], i, blocks, 1)]).logits for i in (67, 68, 69)]
    assert torch.equal(torch.cat(alone), whole)
