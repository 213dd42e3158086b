"""The programs of `make gpu` start and end on CUDA, so that no device time is lost to a mistake in
one of them."""

from __future__ import annotations

import json

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


def test_every_part_that_measures_ends_well() -> None:
    """Law: every part has exit code 0, and captures contain nothing that CUDA forbids."""
    found = json.loads(run("-m", "tests.cuda_host.day"))
    assert found["violations"] == []
    assert {name: error for name, error in found["ended"].items() if error} == {}


def test_the_gpu_tier_fails_by_values_alone() -> None:
    """Bug: the GPU tests had never run, and a warning from torch would have failed most of them.
    Law: with zeros everywhere, a test fails only in an assertion."""
    ended = json.loads(run("-m", "tests.cuda_host.rehearse"))
    assert len(ended) > 40
    assert {name: error for name, error in ended.items() if error} == {}
