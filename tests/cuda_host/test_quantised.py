"""Weights and keys in fewer bits, captured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytest.importorskip("torchao")
pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

KEPT = {
    "nothing": ("Parameter", "torch.bfloat16"),
    "int8": ("Int8Tensor", "torch.bfloat16"),
    "int4": ("Int4TilePackedTo4dTensor", "torch.bfloat16"),
    "fp8": ("Float8Tensor", "torch.bfloat16"),
    "keys in fp8": ("Parameter", "torch.float8_e4m3fn"),
    "both in fp8": ("Float8Tensor", "torch.float8_e4m3fn"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What `tests.cuda_host.quantised` found of each."""
    found: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.cuda_host.quantised"))
    return found


@pytest.mark.parametrize("what", KEPT)
def test_it_is_kept_as_it_was_asked_for_and_captured(
    found: dict[str, dict[str, Any]], what: str
) -> None:
    """Law: torch knows every operation on such numbers on CUDA, prompts included, and a graph may
    hold those of a decoding step."""
    mine = found[what]
    assert mine["said"] == []
    assert (mine["weights"], mine["keys"]) == KEPT[what]
    assert mine["graphs"]


def test_a_cache_in_eight_bits_costs_few_kernels(found: dict[str, dict[str, Any]]) -> None:
    """Law: keys and values are bounded, rounded and written by operations of torch, six in a layer,
    where the layer's own kernel writes what needs no rounding; attention's widens them."""
    assert found["keys in fp8"]["kernels"] - found["nothing"]["kernels"] <= 6 * 2  # of two layers
