"""Graphs that are dropped and recorded again while requests run."""

from __future__ import annotations

import json

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


def test_a_dropped_graph_is_freed_and_recorded_again() -> None:
    """Law: each new graph replaces one, which is destroyed and whose memory is used again, outside
    captures; every token still arrives."""
    found = json.loads(run("-m", "tests.cuda_host.evicted"))
    assert found["violations"] == []
    for each in found["rounds"]:
        assert each["capture"] == each["graph destroyed"] > 0
        assert each["tokens"] == each["wanted"]
    sizes = [(each["device allocation"], each["device free"]) for each in found["rounds"][2:]]
    assert all(allotted == freed for allotted, freed in sizes)
