"""Swapping in a draft on CUDA: a thread loads it beside the steps; captures run between them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of `tests.cuda_host.swaps`."""
    found: dict[str, Any] = json.loads(run("-m", "tests.cuda_host.swaps"))
    return found


def test_two_threads_send_each_its_own_numbers(results: dict[str, Any]) -> None:
    """Bug: the proof of a draft and the steps beside it shared one page-locked buffer, so a step
    could get the proof's positions."""
    assert results["mixed up"] == 0


def test_steps_and_what_is_loaded_beside_them_do_nothing_forbidden(results: dict[str, Any]) -> None:
    """Law: each graph is also captured in a piece of its own. A draft of the same shape takes no KV
    cache memory; one of another shape does, and is refused if there is none."""
    assert results["violations"] == []
    swaps = results["swaps"]
    outcomes = {kind: found["outcome"] for kind, found in swaps.items()}
    assert outcomes == {"same shape": "trial", "another shape": "trial", "no room": "refused"}
    assert min(swaps[kind]["pieces"] for kind in ("same shape", "another shape")) > 20
    assert [swaps[kind]["shared"] for kind in ("same shape", "another shape")] == [True, False]
    assert "may be used on cuda:0" in swaps["no room"]["message"]
