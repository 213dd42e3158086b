"""What a step asks of the device with each proposer but a draft model (test_step.py), trees too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

# The most waits, copies to the device, of these from pageable memory, and launches outside graphs.
# A commit that reduces a figure lowers its ceiling; no commit raises one.
CEILINGS = {
    "ngram": (1, 2, 0, 2),
    "lookahead": (1, 2, 0, 2),
    "self": (1, 3, 0, 2),
    "medusa": (2, 4, 0, 54),
    "eagle": (3, 5, 0, 188),
    "branches": (2, 4, 0, 2),
}
COUNTED = (
    "waits for the device", "copies to the device", "of these from pageable memory",
    "launches outside graphs",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Return the results of `tests.cuda_host.proposers`, by proposer."""
    by_kind: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.cuda_host.proposers"))
    return by_kind


@pytest.mark.parametrize("kind", CEILINGS)
def test_a_step_stays_under_its_ceilings(found: dict[str, dict[str, Any]], kind: str) -> None:
    """Law: the proposals of heads are trees that the host builds from what it reads, so a step with
    them waits again for each read, as one with second-best tokens does; every other one waits once.
    The target's forward is a graph with any of them, and no step allocates, captures or compiles.
    """
    most = found[kind]["most"]
    for name, ceiling in zip(COUNTED, CEILINGS[kind], strict=True):
        assert most[name] <= ceiling, name
    assert most["tokens"] > 1  # of each sequence: its proposal was verified
    assert most["launches of graphs"] > 0
    assert most["allocations, frees and captures"] == 0
    assert found[kind]["violations"] == found[kind]["compiled"] == []
