"""What a step asks of the device stays under the ceilings of limits.py, with 1, 32 and 64 sequences
of 1000 tokens and K = 4."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing
from tests.cuda_host.limits import (
    FIELDS,
    FLASHINFER_CEILINGS,
    NODES,
    SEQUENCES,
    STEPS,
    Nodes,
    Step,
    field_ceiling,
)

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


@pytest.mark.parametrize("column", range(len(SEQUENCES)), ids=map(str, SEQUENCES))
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_stays_under_its_ceiling(found: dict[str, Any], step: Step, column: int) -> None:
    """Law: this holds in each step of a cycle that enters blocks at every offset."""
    most = found["steps"][str(SEQUENCES[column])]["most"][step.name]
    assert most <= step.ceilings[column]


@pytest.mark.parametrize("column", range(len(SEQUENCES)), ids=map(str, SEQUENCES))
@pytest.mark.parametrize("fields", FIELDS)
def test_no_field_makes_the_host_wait(found: dict[str, Any], fields: str, column: int) -> None:
    """Law: if all sequences request filters, penalties and log-probabilities, a step waits for the
    device once, allocates nothing, and launches no more than its ceiling."""
    there = found["fields"][fields][str(SEQUENCES[column])]["most"]
    for step in STEPS:
        ceiling = field_ceiling(step, fields, column)
        assert ceiling is None or there[step.name] <= ceiling, step.name


@pytest.mark.parametrize("column", range(len(SEQUENCES)))
def test_flashinfers_plans_stay_under_their_ceilings(found: dict[str, Any], column: int) -> None:
    """Law: a plan does not make the host wait, and copies no more than the library's does."""
    most = found["flashinfer"][str(SEQUENCES[column])]["most"]
    for step in STEPS:
        assert most[step.name] <= FLASHINFER_CEILINGS.get(step.name, step.ceilings)[column], (
            step.name
        )


@pytest.mark.parametrize("nodes", NODES, ids=lambda nodes: nodes.name)
def test_a_graph_stays_under_its_ceiling(found: dict[str, Any], nodes: Nodes) -> None:
    """Law: each node is a kernel or a copy, and costs the device at least a few microseconds."""
    assert found["nodes"][nodes.name] <= nodes.ceiling


def test_captures_hold_nothing_that_cuda_forbids(found: dict[str, Any]) -> None:
    """Law: no graph of either model contains a wait, pageable copy, other stream or free."""
    assert found["violations"] == []
