"""The cores that a container grants, and the number of threads that torch uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.child import engine_threads, limit_threads


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 63),
        ({"cpu.max": "max 100000\n"}, 63),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "250000 100000\n"}, 1),
        ({"cpu.max": "300000 100000\n"}, 2),
        ({"cpu.max": "99900000 100000\n"}, 63),
        ({"cpu.max": "garbage"}, 63),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 63),
    ],
)
def test_a_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], threads: int
) -> None:
    """Law: use one thread less than the cores of the affinity mask and the quota, but at least one:
    idle engine threads spin, and one too many slows every layer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert engine_threads(tmp_path) == threads


def test_the_operator_has_the_last_word() -> None:
    """Law: the configuration overrides the environment, which overrides the count of cores."""
    environment = {"OMP_NUM_THREADS": "5"}
    limit_threads(None, environment)
    assert environment == {"OMP_NUM_THREADS": "5"}
    limit_threads(3, environment)
    assert environment == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    environment = {}
    limit_threads(None, environment)
    assert environment["OMP_NUM_THREADS"] == str(engine_threads())
