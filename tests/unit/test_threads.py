"""Cores granted by a container, and what torch is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.child import engine_threads, granted_cores, limit_threads

ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, ALLOWED),
        ({"cpu.max": "max 100000\n"}, ALLOWED),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "99900000 100000\n"}, ALLOWED),
        ({"cpu.max": "garbage"}, ALLOWED),
    ],
)
def test_a_quota_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    """At least one core, at most the affinity mask, and never more than the quota."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert granted_cores(tmp_path) == cores


def test_the_operator_has_the_last_word() -> None:
    """The configuration wins over the environment, the environment over the count."""
    environment = {"OMP_NUM_THREADS": "5"}
    limit_threads(None, environment)
    assert environment == {"OMP_NUM_THREADS": "5"}
    limit_threads(3, environment)
    assert environment == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    environment = {}
    limit_threads(None, environment)
    assert environment["OMP_NUM_THREADS"] == str(engine_threads(granted_cores()))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (64, 63)])
def test_the_front_end_keeps_a_core(cores: int, threads: int) -> None:
    """The engine's threads spin while they wait: one too many slows every layer."""
    assert engine_threads(cores) == threads
