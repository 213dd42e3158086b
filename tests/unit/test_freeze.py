"""freeze_memory: memory and objects stay, with the same content."""

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


def test_content_does_not_change() -> None:
    """Law: memory keeps its content, whether it was written completely, partly or not at all, and
    so do objects."""
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


def test_unwritten_memory_is_not_allocated() -> None:
    """Law: freezing allocates no unwritten memory, such as that of an empty KV cache."""
    untouched = anonymous(64 * HUGE_PAGE)
    before = resident()
    freeze_memory().join()
    assert resident() - before < 32 * HUGE_PAGE
    assert len(untouched) == 64 * HUGE_PAGE


def resident() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_it_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: if the system has no such file, nothing fails."""
    monkeypatch.setattr(engine.child, "_MAPS", tmp_path / "none")
    freeze_memory().join()
    assert gc.get_freeze_count() > 0
