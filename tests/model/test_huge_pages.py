"""Memory in huge pages, where the machine has them."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from engine.model.kv_cache import HUGE_PAGE, space


@pytest.mark.parametrize("size", [0, 1, HUGE_PAGE // 2, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_it_is_as_large_as_asked_for_and_empty(size: int) -> None:
    """Law: the array has the requested size, is all zero, and is writable everywhere."""
    found = space(size)
    assert found.shape == (size,)
    assert found.dtype == np.uint8
    assert not found.any()
    found[:] = 7
    assert found.sum(dtype=np.int64) == 7 * size


def test_it_starts_at_a_huge_page() -> None:
    """Bug: arrays began in the middle of huge pages, so 5.5 of 13.5 MB of weights lay in small
    pages."""
    for size in (HUGE_PAGE // 2, HUGE_PAGE, 5 * HUGE_PAGE):
        assert space(size).ctypes.data % HUGE_PAGE == 0


def test_small_arrays_start_at_cache_lines() -> None:
    """Bug: weights smaller than half a huge page, those of small models, were aligned to 16 bytes
    only, so every vector read crossed two cache lines."""
    held = [space(size) for size in (1, 100, 4097, 65536, HUGE_PAGE // 2 - 1) for _ in range(8)]
    assert {found.ctypes.data % 64 for found in held} == {0}


def test_two_spaces_share_nothing() -> None:
    first, second = space(HUGE_PAGE), space(HUGE_PAGE)
    first[:] = 1
    assert not second.any()


def test_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where the system grants no huge pages, ordinary memory is used."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert space(2 * HUGE_PAGE).nbytes == 2 * HUGE_PAGE
