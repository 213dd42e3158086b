"""What was built stays, and is the same afterwards."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.child
from engine.child import freeze_memory

HUGE_PAGE = 1 << 21


@pytest.fixture(autouse=True)
def collected_again() -> Iterator[None]:
    yield
    gc.unfreeze()


def anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_nothing_is_another_afterwards() -> None:
    """Law: memory holds what it held, whether all of it was written, or parts, or nothing, and so
    do objects."""
    partly, untouched = anonymous(8 * HUGE_PAGE), anonymous(4 * HUGE_PAGE)
    for at in range(0, len(partly), 3 * mmap.PAGESIZE):
        partly[at : at + 2] = bytes([at // mmap.PAGESIZE % 251, 7])
    before = partly[:]
    objects = [{"number": i, "text": str(i)} for i in range(100_000)]
    freeze_memory().join()
    assert partly[:] == before
    assert untouched[:] == bytes(len(untouched))
    assert objects == [{"number": i, "text": str(i)} for i in range(100_000)]
    assert gc.get_freeze_count() > 0


def test_it_takes_no_memory_that_was_never_written() -> None:
    """Law: a cache for keys and values that nobody has filled yet stays what the plan says."""
    untouched = anonymous(64 * HUGE_PAGE)
    before = resident()
    freeze_memory().join()
    assert resident() - before < 32 * HUGE_PAGE
    assert len(untouched) == 64 * HUGE_PAGE


def resident() -> int:
    """Bytes that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_it_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: where the system has no such file, nothing fails."""
    monkeypatch.setattr(engine.child, "_MAPS", tmp_path / "none")
    freeze_memory().join()
    assert gc.get_freeze_count() > 0
