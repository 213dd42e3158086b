"""No request waits for a kernel to be compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


def test_every_kernel_is_compiled_at_the_start() -> None:
    """Bug: the first step with filters compiled three kernels, with 20 log-probabilities two: up to
    8 of the 30 seconds after which the watchdog ends a worker."""
    found: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.cuda_host.compiled"))
    assert found.pop("at start")["compiled"] > 0
    assert {case: each["compiled"] for case, each in found.items() if each["compiled"]} == {}
    assert all(each["tokens"] == each["wanted"] for each in found.values())
