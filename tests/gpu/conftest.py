"""This tier's own tiny pair, with heads of 16, a size that kernels for GPUs accept."""

from __future__ import annotations

import pytest

from tests.support import tiny


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tiny.llama(tiny.ON_CUDA), tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    draft = tiny.draft_of(tiny.llama(tiny.ON_CUDA))
    return tiny.save(draft, tmp_path_factory.mktemp("models") / "draft")
