"""The day of the GPU starts and ends on CUDA: on the day itself there is no time for a slip in a
program."""

from __future__ import annotations

import json

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


def test_every_part_that_measures_ends_well() -> None:
    """Law: exit code 0, and captures hold nothing that CUDA forbids."""
    found = json.loads(run("-m", "tests.cuda_host.day"))
    assert found["violations"] == []
    assert {name: said for name, said in found["ended"].items() if said} == {}


def test_the_gpu_tier_fails_by_values_alone() -> None:
    """Bug: the tier had never run, and most of it would have died of a warning of torch's. Law:
    what fails where every number is zero fails in an assertion."""
    ended = json.loads(run("-m", "tests.cuda_host.rehearse"))
    assert len(ended) > 40
    assert {name: said for name, said in ended.items() if said} == {}
