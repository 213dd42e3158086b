"""Products on AMX tiles, with weights of sixteen, twelve and eight bits; emulated on processors
without AMX."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from engine.cpu import kernels_tiles
from engine.cpu.jit import HAS_TILES
from engine.cpu.vectors import PANEL
from engine.cpu.weights import DoesNotFit, int8_of, pack, pack_eight, pack_int8, pack_twelve
from tests.support.emulated_tiles import emulate

INT8 = partial(pack_int8, pairs=False)
ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 70)


@pytest.fixture(autouse=True, scope="module")
def tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TILES:
            emulate(patch)
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def as_words(rows: Tensor) -> npt.NDArray[np.uint32]:
    return rows.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint32)


def sums(rows: Tensor, weights: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return the product; the output lies between rows of NaN, which must not be overwritten."""
    around = np.full((len(rows) + 2, len(weights) * PANEL), np.nan, np.float32)
    words, out = as_words(rows), around[1:-1]
    if weights.dtype == np.uint32:
        kernels_tiles.product_of_tiles(words, weights, out)
    else:
        space = kernels_tiles.room(words.shape[1], PANEL)
        kernels_tiles.product_of_codes(words, weights, space, out)
    assert np.isnan(around[[0, -1]]).all()
    return around[1:-1].copy()


def decoded(codes: npt.NDArray[np.uint16], outputs: int, inputs: int) -> Tensor:
    """Return the weights `[outputs, in]` that eight-bit codes stand for, by definition."""
    size = inputs // 2 * PANEL
    pairs = codes[:, :size].reshape(len(codes), -1, PANEL).transpose(0, 2, 1)
    numbers = np.ascontiguousarray(pairs).reshape(-1, inputs // 2).view(np.uint8)
    found = torch.from_numpy(numbers.astype(np.int64))
    bases = np.ascontiguousarray(codes[:, size : size + 2 * PANEL]).view(np.uint32).reshape(-1)
    lowest = torch.from_numpy((bases >> 16 >> 7).astype(np.int64))[:, None] - 127
    weight = 2.0 ** (lowest + found % 128 // 16) * (1 + found % 16 / 16.0)
    return torch.where(found >= 128, -weight, weight)[:outputs].double()


def with_exceptions(weight: Tensor, count: int) -> Tensor:
    """Return `weight` with `count` weights of the first panel, spread from its first to its last
    place, given an exponent of their own."""
    weight = weight.bfloat16()
    places = torch.linspace(0, PANEL * weight.shape[1] - 1, count).long()
    every = torch.linspace(-110, 110, count).round()
    weight[:PANEL].view(-1)[places] = (2.0**every).bfloat16()
    return weight


@pytest.mark.parametrize("form", [pack, pack_twelve, pack_eight, INT8])
@pytest.mark.parametrize("inputs", [32, 96, 256])  # one tile step, and several
def test_a_product_is_right_and_batch_invariant(form: Any, inputs: int) -> None:
    """Law: this holds for every row count around whole tiles and pairs of tiles, wherever the rows
    lie; nothing outside the rows is written, and outputs that do not exist are 0."""
    weight, rows = random(70, inputs).bfloat16(), random(max(ROWS), inputs).bfloat16()
    weights = form(weight)
    meant = decoded(weights, 70, inputs) if form is pack_eight else weight.double()
    if form is INT8:  # scales are applied later
        meant = int8_of(weight)[0].double()
    alone = np.concatenate([sums(rows[i : i + 1], weights) for i in range(len(rows))])
    exact = (rows.double() @ meant.T).numpy()
    np.testing.assert_allclose(alone[:, :70], exact, rtol=1e-4, atol=1e-6 * abs(exact).max() + 1e-4)
    assert not alone[:, 70:].any()
    for count in ROWS[1:]:
        for first in (0, len(rows) - count):
            found = sums(rows[first : first + count], weights)
            assert found.tobytes() == alone[first : first + count].tobytes(), (count, first)


@pytest.mark.parametrize("inputs", [32, 64, 352])
def test_twelve_bits_equal_sixteen(inputs: int) -> None:
    """Law: twelve-bit products are bit-identical to sixteen-bit ones, with zero weights, with as
    many exceptional exponents as fit, and with outputs that do not fill a panel."""
    weight = with_exceptions(random(70, inputs), inputs // 8)
    weight[40:43] = 0.0
    weight[50, ::3] *= -0.0
    rows = random(max(ROWS), inputs)
    words, codes = pack(weight), pack_twelve(weight)
    for count in ROWS:
        expected = sums(rows[:count], words)
        np.testing.assert_array_equal(sums(rows[:count], codes), expected)
        assert np.isfinite(expected).all()


def test_every_weight_of_twelve_bits_is_found_again() -> None:
    """Law: a row that is one at a single input and zero elsewhere returns that input's weights."""
    weight = with_exceptions(random(96, 128), 16)
    found = sums(torch.eye(128), pack_twelve(weight))
    np.testing.assert_array_equal(found.T, weight.float().numpy())


def test_twelve_bits_take_little_more_than_three_quarters() -> None:
    weight = random(256, 1024)
    assert pack_twelve(weight).nbytes < 0.77 * pack(weight).nbytes


def test_too_many_exponents_do_not_fit() -> None:
    """Law: one exponent exception more than fits is refused, not dropped."""
    pack_twelve(with_exceptions(random(32, 128), 16))
    with pytest.raises(DoesNotFit):
        pack_twelve(random(32, 128) * 2.0 ** torch.linspace(-40, 40, 128))


def test_a_weight_of_eight_bits_is_kept_to_one_part_in_32_unless_it_is_small() -> None:
    """Law: the largest weight of each output sets its exponent range, independent of other outputs;
    weights below the range become its smallest value."""
    weight = random(70, 96) * 10.0 ** torch.linspace(-6, 3, 70)[:, None]
    weight[3] *= 0
    weight[5, 7], weight[6, 8] = -2.0, 3.999
    found, weight = decoded(pack_eight(weight), 70, 96), weight.double()
    least = 2.0 ** (weight.abs().amax(1, keepdim=True).log2().floor() - 7)
    wrong = (found - weight).abs()
    other = torch.arange(70) != 3
    assert (wrong <= torch.maximum(weight.abs() / 31, least))[other].all()
    assert (found.sign() == weight.sign())[weight != 0].all()
    assert found[3].abs().max() < 1e-30
    assert float(wrong[other].pow(2).sum() / weight.pow(2).sum()) < 0.02**2


def test_zeros_in_eight_bits_cancel_out() -> None:
    """Law: the format lacks zero: zeros become its smallest value, with alternating signs."""
    weight = torch.zeros(32, 64)
    weight[:, 0] = 1.0
    assert float(decoded(pack_eight(weight), 32, 64)[:, 2:].sum(1).abs().max()) == 0.0


def test_allocations_start_at_cache_lines() -> None:
    """Law: each allocation starts at a cache line, is its own, and holds all that was asked for."""
    shapes = [(1, 1), (3, 7), (17, 32), (64, 192), (256, 1152)]
    rooms = [kernels_tiles.room(*shape) for shape in shapes]
    for i, room in enumerate(rooms):
        room[:] = i
    for i, (room, shape) in enumerate(zip(rooms, shapes, strict=True)):
        assert room.ctypes.data % 64 == 0
        assert room.shape == shape
        assert (room == i).all()
