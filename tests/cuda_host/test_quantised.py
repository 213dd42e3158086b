"""Quantized weights and KV caches, with captured forwards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

KEPT = {
    "nothing": ("torch.bfloat16", "torch.bfloat16"),
    "int8": ("int8", "torch.bfloat16"),
    "int4": ("int4", "torch.bfloat16"),
    "fp8": ("fp8", "torch.bfloat16"),
    "keys in fp8": ("torch.bfloat16", "torch.float8_e4m3fn"),
    "both in fp8": ("fp8", "torch.float8_e4m3fn"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Return the results of `tests.cuda_host.quantised`."""
    found: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.cuda_host.quantised"))
    return found


@pytest.mark.parametrize("variant", KEPT)
def test_each_variant_is_stored_as_configured_and_captured(
    found: dict[str, dict[str, Any]], variant: str
) -> None:
    """Law: torch supports every operation on such numbers on CUDA, prompts included, and those of a
    decoding step can be captured."""
    result = found[variant]
    assert result["violations"] == []
    assert (result["weights"], result["keys"]) == KEPT[variant]
    assert result["graphs"]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_weights_cost_no_kernels(kind: str, found: dict[str, dict[str, Any]]) -> None:
    """Law: a decoding step with quantized weights has the kernels of one without."""
    assert found[kind]["kernels"] == found["nothing"]["kernels"]


def test_a_cache_in_eight_bits_costs_few_kernels(found: dict[str, dict[str, Any]]) -> None:
    """Law: torch clamps, rounds and writes keys and values in at most six more kernels per layer,
    since the layer's own kernel only writes unrounded ones; the attention kernel widens them."""
    assert found["keys in fp8"]["kernels"] - found["nothing"]["kernels"] <= 6 * 2  # for two layers
