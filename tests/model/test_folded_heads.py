"""Query heads that share keys run as rows of one head, for SDPA on a CPU."""

from __future__ import annotations

import pytest
import torch

from engine.attention.interface import Variation
from engine.attention.sdpa import FOLDED_ROWS, attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, FOLDED_ROWS])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_folded_heads_attend_as_grouped_ones(
    dtype: torch.dtype, rows: int, masked: bool, batch: int
) -> None:
    """Law: heads that share keys become rows of one head, with the mask expanded to match."""
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
