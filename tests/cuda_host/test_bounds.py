"""Steps whose sequences have different numbers of draft tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

ASKED = ("waits for the device", "launches of graphs", "allocations, frees and captures")
PLAIN = (*ASKED, "copies to the device", "launches outside graphs")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of `tests.cuda_host.bounds`."""
    found: dict[str, Any] = json.loads(run("-m", "tests.cuda_host.bounds"))
    return found


@pytest.mark.parametrize("case", ["ends of texts", "bounds of requests", "both, with fields"])
def test_they_ask_no_more_of_the_device_than_others(results: dict[str, Any], case: str) -> None:
    """Bug: one sequence in its last K tokens made the whole step wait five times. Law: such a step
    waits once and launches what others launch, besides what a request's fields need."""
    usual, found = results["none"], results[case]
    assert usual["unequal"] == 0 < found["unequal"]
    assert usual["most"]["waits for the device"] == 1
    for name in ASKED if "fields" in case else PLAIN:
        assert found["most"][name] <= usual["most"][name], name
    assert results["violations"] == []
