"""Fixtures shared by the tiers. Imports no torch: the unit and api tiers run without it."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# torch's threads that share a core wait for each other in every product. Set before it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadlines: the machine may be busy. No database: a failing example is printed, not kept.
settings.register_profile("tests", deadline=None, database=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random Llama."""
    from tests.support import tiny

    return tiny.save(tiny.llama(), tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a one-layer Llama that agrees with the tiny target now and then."""
    from tests.support import tiny

    return tiny.save(tiny.draft_of(tiny.llama()), tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture(scope="session")
def tiny_eos() -> list[int]:
    """The EOS ids of both tiny models."""
    from tests.support import tiny

    return list(tiny.EOS)
