"""Products on tiles by themselves: one tile of rows, two that share their weights, and what is left
behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_bfloat16 import pack
from engine.cpu.kernels_streams import PANEL
from engine.cpu.kernels_tiles import product_of_tiles, room

pytestmark = pytest.mark.skipif(
    not HAS_TILES, reason="the processor has no AMX, or does not grant it"
)


@pytest.mark.parametrize("inputs", [32, 192])  # one step of a tile, and several
def test_a_product_is_right_and_a_row_the_same_to_the_bit_in_any_company(inputs: int) -> None:
    """Law: for every count of rows about whole tiles and pairs of them, whatever their places in
    memory; nothing beside the rows is written."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * PANEL, inputs, generator=random).bfloat16()
    rows = torch.randn(130, inputs, generator=random).bfloat16()
    words, x = pack(weight), rows.view(torch.uint32).numpy()
    alone = np.concatenate([product(x[row : row + 1], words) for row in range(len(x))])
    exact = (rows.double() @ weight.double().T).numpy()
    np.testing.assert_allclose(alone, exact, rtol=1e-4, atol=1e-4)
    for count in (2, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 81, 96, 97, 113):
        for first in (0, len(x) - count):
            found = product(x[first : first + count], words)
            assert found.tobytes() == alone[first : first + count].tobytes(), (count, first)


def product(x: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Between rows of NaN, which must stay."""
    count = len(x)
    around = np.full((count + 2, len(words) * PANEL), np.nan, np.float32)
    product_of_tiles(x, words, around[1:-1])
    assert np.isnan(around[[0, -1]]).all()
    return around[1:-1].copy()


def test_room_begins_at_a_border_of_cache_lines() -> None:
    """Law: whatever was asked for before, each room is its own and holds all that was asked for."""
    shapes = [(1, 1), (3, 7), (17, 32), (64, 192), (256, 1152)]
    rooms = [room(*shape) for shape in shapes]
    for i, mine in enumerate(rooms):
        mine[:] = i
    for i, (mine, shape) in enumerate(zip(rooms, shapes, strict=True)):
        assert mine.ctypes.data % 64 == 0
        assert mine.shape == shape
        assert (mine == i).all()
