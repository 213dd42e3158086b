"""Products of rows by vector instructions: in float32, and in bfloat16 either with the instruction
for pairs or as float32, whichever is faster on the processor."""

from __future__ import annotations

import re
from typing import Any

import numba
import numpy as np
import pytest
import torch

from engine.cpu.kernels_products import ROWS_AT_ONCE, as_words, by_vectors, product, rounded_rows
from engine.cpu.vectors import HAS_AVX512, MULTIPLIES_PAIRS, PANEL
from engine.cpu.weights import int8_of, pack, pack_int8, padded

WAYS: list[Any] = [
    lambda x: x,
    rounded_rows,
    pytest.param(
        as_words,
        marks=pytest.mark.skipif(not MULTIPLIES_PAIRS, reason="no AVX512_BF16 here"),
    ),
]
IDS = ["float32", "rounded", "pairs"]


def rows_of(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).bfloat16()


def by(way: Any, rows: torch.Tensor, words: Any) -> torch.Tensor:
    found = np.full((len(rows), len(words) * PANEL), np.nan, dtype=np.float32)
    by_vectors(way(rows.float().numpy()), rows.shape[1] // 2, words, found)
    return torch.from_numpy(found)


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("inputs", [2, 34, 192])
@pytest.mark.parametrize("outputs", [1, 32, 70, 7 * PANEL])
def test_it_is_the_product(way: Any, outputs: int, inputs: int) -> None:
    """Law: any weights, any number of rows, also more than run at once; missing outputs are 0."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    words = pack(weight)
    assert len(words) * PANEL == padded(outputs)
    for count in (*range(ROWS_AT_ONCE + 3), 3 * ROWS_AT_ONCE + 1):
        rows = rows_of(count, inputs)
        found = by(way, rows, words)
        expected = rows.double() @ weight.double().T
        torch.testing.assert_close(found[:, :outputs].double(), expected, rtol=1e-5, atol=1e-5)
        assert not found[:, outputs:].any()


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_a_row_is_batch_invariant(way: Any) -> None:
    """Law: a row's sums run over the inputs in order, however many rows are in the call."""
    words, rows = pack(rows_of(96, 576)), rows_of(41, 576)
    expected = by(way, rows, words)
    for size in range(1, ROWS_AT_ONCE + 4):
        for first in range(0, len(rows), size):
            found = by(way, rows[first : first + size], words)
            assert torch.equal(found, expected[first : first + size]), (size, first)


@pytest.mark.parametrize("inputs", [52, 96])  # without whole tiles, and with
def test_rows_of_bfloat16_are_rounded_as_torch_does(inputs: int) -> None:
    """Law: whichever instructions multiply; a row's bits do not depend on the other rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, inputs, generator=generator).bfloat16()
    rows, words = torch.randn(35, inputs, generator=generator), pack(weight)

    def of(some: torch.Tensor) -> torch.Tensor:
        out = np.full((len(some), padded(70)), np.nan, dtype=np.float32)
        product(some.numpy(), words, True, out)
        return torch.from_numpy(out)[:, :70]

    together = of(rows)
    expected = rows.bfloat16().double() @ weight.double().t()
    assert torch.allclose(together.double(), expected, rtol=1e-5, atol=1e-4)
    for count in (0, *range(1, 12), 16, 17, 28):
        for first in (0, 7):
            assert torch.equal(of(rows[first : first + count]), together[first : first + count])
    pairs = torch.from_numpy(as_words(rows.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(pairs, rows.bfloat16())
    assert torch.equal(
        torch.from_numpy(rounded_rows(rows.numpy()))[:, :inputs], rows.bfloat16().float()
    )


def codes_of(weight: torch.Tensor, rows: torch.Tensor, way: Any = None) -> torch.Tensor:
    """Return the int8 product by the default choice, or by the given `way`, without scales."""
    if way is not None:
        return by(way, rows, pack_int8(weight, pairs=way is as_words))
    codes = pack_int8(weight)
    found = np.full((len(rows), padded(len(weight))), np.nan, dtype=np.float32)
    product(rows.float().numpy(), codes, True, found)
    return torch.from_numpy(found)


@pytest.mark.parametrize("way", WAYS[1:], ids=IDS[1:])
@pytest.mark.parametrize("inputs", [2, 34, 192])
@pytest.mark.parametrize("outputs", [1, 32, 70, 7 * PANEL])
def test_of_int8_it_is_the_product_of_the_numbers(way: Any, outputs: int, inputs: int) -> None:
    """Law: int8 weights are widened exactly; sums over few inputs have no error at all, and a row
    has the same bits in any batch."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    numbers, _ = int8_of(weight)
    assert int(numbers.abs().amax(1).min()) == 127
    rows = rows_of(3 * ROWS_AT_ONCE + 1, inputs)
    together = codes_of(weight, rows, way)
    expected = rows.double() @ numbers.double().T
    torch.testing.assert_close(together[:, :outputs].double(), expected, rtol=1e-5, atol=1e-2)
    assert not together[:, outputs:].any()
    for count in range(1, ROWS_AT_ONCE + 3):
        for first in (0, len(rows) - count):
            found = codes_of(weight, rows[first : first + count], way)
            assert torch.equal(found, together[first : first + count]), (count, first)


@pytest.mark.parametrize("inputs", [52, 96])  # without whole tiles, and with
def test_scales_of_int8_join_the_sums(inputs: int) -> None:
    """Law: each output has its own scale, whatever the size of its weights; an all-zero output
    gives 0, one with NaN gives NaN; a row's bits are its own."""
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(70, inputs, generator=generator) * 10.0 ** torch.linspace(-9, 9, 70)[:, None]
    )
    weight[5], weight[7, 3] = 0.0, float("nan")
    rows = torch.randn(35, inputs, generator=generator).bfloat16()
    together = codes_of(weight, rows)
    numbers, scales = int8_of(weight)
    meant = numbers.double() * scales[:, None].double()
    assert float(((meant - weight).abs() / scales[:, None]).nan_to_num().max()) <= 0.5 + 1e-6
    expected = rows.double() @ meant.T
    wrong = (together[:, :70] - expected).abs() / (scales * 127)
    assert float(wrong.nan_to_num().max()) < 1e-4
    assert together[:, 7].isnan().all()
    assert not together[:, 5].any()
    assert not together[:, 70:].any()
    for count in (1, 2, 11, 16, 17):
        found = codes_of(weight, rows[7 : 7 + count])
        assert found.numpy().tobytes() == together[7 : 7 + count].numpy().tobytes()


def test_float32_products_of_bfloat16_are_exact() -> None:
    """Law: where sums are representable, products are exact, down to the smallest numbers."""
    numbers = [3.3895e38, -3.3895e38, 1.1755e-38, -0.0, 1.0, 1.0078125, float("inf"), -3.5]
    for i, number in enumerate(numbers):
        rows = torch.zeros(1, 32).bfloat16()
        rows[0, 3 + i] = number
        weight = torch.zeros(32, 32).bfloat16()
        weight[5, 3 + i] = 1.0
        assert by(rounded_rows, rows, pack(weight))[0, 5] == rows[0, 3 + i].float()


@pytest.mark.parametrize("form", [pack, pack_int8])
def test_sums_stay_in_registers(form: Any) -> None:
    """Law: the loops over inputs store nothing. With more rows at once than the registers hold sums
    for, a product takes twice as long."""
    compiled = numba.njit(error_model="numpy")(by_vectors.py_func)
    compiled(
        np.zeros((ROWS_AT_ONCE, 64), np.float32),
        32,
        form(rows_of(64, 64)),
        np.zeros((ROWS_AT_ONCE, 64), np.float32),
    )
    (code,) = compiled.inspect_asm().values()
    loops = re.findall(r"\n(\.LBB\w+):((?:(?!\n\.LBB).)*?)\n\s*j\w+\s+\1\b", code, re.S)
    products = [body for _, body in loops if body.count("vfmadd") > 1]
    assert len(products) >= ROWS_AT_ONCE
    register = "zmm" if HAS_AVX512 else "ymm"
    stored = [re.findall(rf"vmov\w+\s+%{register}\d+, .*\(.*", body) for body in products]
    assert max(map(len, stored)) <= 1, stored
