"""Products of rows in bfloat16 by pairs and by their halves: which of the two a processor takes is
a matter of speed, so both are tested wherever there are pairs."""

from __future__ import annotations

import re
from typing import Any

import numba
import numpy as np
import pytest
import torch

from engine.cpu import kernels_codes
from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_bfloat16 import pack, padded, taken_apart
from engine.cpu.kernels_streams import PANEL, ROWS_AT_ONCE, by_vectors
from engine.cpu.vectors import SLOW_PAIRS, multiplies_pairs

pytestmark = pytest.mark.skipif(not multiplies_pairs(), reason="the processor has no AVX512_BF16")

WAYS: dict[str, Any] = {"pairs": lambda rows: rows, "halves": taken_apart}


def rows_of(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).bfloat16()


def product(way: str, rows: torch.Tensor, words: Any, outputs: int) -> torch.Tensor:
    found = np.full((len(rows), padded(outputs)), np.nan, dtype=np.float32)
    x = rows.contiguous().view(torch.uint32).numpy()
    by_vectors(WAYS[way](x), x.shape[1], words, found)
    return torch.from_numpy(found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inputs", [2, 34, 192])
@pytest.mark.parametrize("outputs", [1, 32, 70, 7 * PANEL, 9 * PANEL, 11 * PANEL - 1])
def test_it_is_the_product(way: str, outputs: int, inputs: int) -> None:
    """Law: any number of rows, also more than go at once, by any weights, also panels that are no
    multiple of those read at once; missing outputs are 0."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    words = pack(weight)
    for count in (*range(1, ROWS_AT_ONCE + 3), 3 * ROWS_AT_ONCE + 1):
        rows = rows_of(count, inputs)
        found = product(way, rows, words, outputs)
        expected = rows.double() @ weight.double().T
        torch.testing.assert_close(found[:, :outputs].double(), expected, rtol=1e-5, atol=1e-5)
        assert not found[:, outputs:].any()


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_the_same_to_the_bit_in_any_company(way: str) -> None:
    """Law: a row's sums run over the inputs in order, however many rows go with it."""
    words, rows = pack(rows_of(96, 576)), rows_of(41, 576)
    expected = product(way, rows, words, 96)
    for size in range(1, ROWS_AT_ONCE + 4):
        for first in range(0, len(rows), size):
            found = product(way, rows[first : first + size], words, 96)
            assert torch.equal(found, expected[first : first + size]), (size, first)


def test_halves_are_exact() -> None:
    """Law: taking a pair apart loses nothing: products of numbers whose sums are exact are exact,
    smallest and largest ones of bfloat16 too."""
    numbers = [3.3895e38, -3.3895e38, 1.1755e-38, -0.0, 1.0, 1.0078125, float("inf"), -3.5]
    for i, number in enumerate(numbers):
        rows = torch.zeros(1, 32).bfloat16()
        rows[0, 3 + i] = number
        weight = torch.zeros(32, 32).bfloat16()
        weight[5, 3 + i] = 1.0
        found = product("halves", rows, pack(weight), 32)
        expected = rows[0, 3 + i].float()
        assert found[0, 5] == expected


@pytest.mark.skipif(HAS_TILES or not SLOW_PAIRS, reason="tiles or pairs are faster here")
@pytest.mark.parametrize("packed", [pack, kernels_codes.pack])
def test_sums_stay_in_registers(packed: Any) -> None:
    """Law: within the loops over inputs hardly anything is stored. In the order of instructions
    that the compiler prefers, eight rows of three panels stored 26 vectors a turn and took twice as
    long."""
    compiled = numba.njit(error_model="numpy")(by_vectors.py_func)
    x = rows_of(ROWS_AT_ONCE, 64).view(torch.uint32).numpy()
    weights, out = packed(rows_of(64, 64)), np.empty((ROWS_AT_ONCE, 64), np.float32)
    compiled(taken_apart(x), x.shape[1], weights, out)
    (code,) = compiled.inspect_asm().values()
    loops = re.findall(r"\n(\.LBB\w+):((?:(?!\n\.LBB).)*?)\n\s*j\w+\s+\1\b", code, re.S)
    products = [body for _, body in loops if body.count("vfmadd") > 1]
    assert len(products) > ROWS_AT_ONCE
    stored = [re.findall(r"vmov\w+\s+%zmm\d+, .*\(.*", body) for body in products]
    assert max(map(len, stored)) <= 1, stored
