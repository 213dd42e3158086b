"""Fixtures shared by all tiers. Imports no torch: the unit and api tiers run without it."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Threads that share a core wait for each other in every matmul. Must be set before torch loads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Clients of this machine only: each would read all certificates that it trusts, for 30 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

# No deadlines: the machine may be busy. No database: failing examples are printed, not stored.
settings.register_profile("tests", deadline=None, database=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny random Llama."""
    from tests.support import tiny

    return tiny.save(tiny.llama(), tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a one-layer Llama that sometimes agrees with the tiny target."""
    from tests.support import tiny

    return tiny.save(tiny.draft_of(tiny.llama()), tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture(scope="session")
def tiny_eos() -> list[int]:
    """Return the EOS ids of both tiny models."""
    from tests.support import tiny

    return list(tiny.EOS)
