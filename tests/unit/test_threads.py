"""Cores granted by a container, and what torch is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.child import engine_threads, limit_threads


@pytest.mark.parametrize(
    ("said", "threads"),
    [
        (None, 63),
        ("max 100000\n", 63),
        ("100000 100000\n", 1),
        ("10000 100000\n", 1),
        ("250000 100000\n", 1),
        ("300000 100000\n", 2),
        ("99900000 100000\n", 63),
        ("garbage", 63),
    ],
)
def test_a_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, threads: int
) -> None:
    """Law: at least one thread, and one less than the cores of the affinity mask and of the quota:
    the engine's threads spin while they wait, and one too many slows every layer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    if said is not None:
        (tmp_path / "cpu.max").write_text(said)
    assert engine_threads(tmp_path) == threads


def test_the_operator_has_the_last_word() -> None:
    """The configuration wins over the environment, the environment over the count."""
    environment = {"OMP_NUM_THREADS": "5"}
    limit_threads(None, environment)
    assert environment == {"OMP_NUM_THREADS": "5"}
    limit_threads(3, environment)
    assert environment == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    environment = {}
    limit_threads(None, environment)
    assert environment["OMP_NUM_THREADS"] == str(engine_threads())
