"""Layers exchanged at load compute what the originals compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.cpu.layers import (
    FLIPPED_ROWS,
    FusedRMSNorm,
    SmallBatchLinear,
    exchange_layers,
    fused_norm,
)
from tests.support import tiny


@pytest.mark.parametrize("rows", [0, 1, 2, FLIPPED_ROWS, FLIPPED_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_from_the_left_equal_the_plain_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    small = SmallBatchLinear(plain)
    for shape in ((1, rows, 24), (rows, 24), (2, rows, 24)):
        given = torch.randn(shape)
        found = small(given)
        torch.testing.assert_close(found, plain(given))
        assert found.is_contiguous()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_every_norm_of_these_families_is_fused(family: str) -> None:
    """Law: both conventions of the weight (itself, less one) are recognised."""
    model = tiny.FAMILIES[family]()
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]
    exchange_layers(model)
    assert len(names) >= 7
    assert all(isinstance(model.get_submodule(name), FusedRMSNorm) for name in names)


def test_a_norm_that_behaves_otherwise_stays() -> None:
    """Law: what is exchanged is decided by what it computes, not by its name."""

    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    assert fused_norm(OddRMSNorm()) is None
    assert fused_norm(nn.LayerNorm(8)) is None


def test_only_large_models_get_other_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: by size alone, so that a restart computes the same bits; bfloat16 is left alone."""
    small, large, half = tiny.llama(), tiny.llama(), tiny.llama().bfloat16()
    exchange_layers(small)
    monkeypatch.setattr("engine.cpu.layers.CACHED_BYTES", 1000)
    exchange_layers(large)
    exchange_layers(half)
    assert not any(isinstance(m, SmallBatchLinear) for m in small.modules())
    assert not any(type(m) is nn.Linear for m in large.modules())
    assert not any(isinstance(m, FusedRMSNorm) for m in half.modules())
    tokens = torch.tensor([[5, 9, 40, 77]])
    with torch.inference_mode():
        expected = tiny.llama()(tokens).logits
        torch.testing.assert_close(large(tokens).logits, expected, rtol=1e-4, atol=1e-4)
