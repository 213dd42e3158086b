"""The stand-in counts operations and reports what a capture forbids; without that, the ceilings of
test_step.py would mean nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]


@pytest.fixture(scope="module")
def probed() -> dict[str, dict[str, Any]]:
    """Return the results of `tests.cuda_host.probe`."""
    found: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.cuda_host.probe"))
    return found


@pytest.mark.parametrize(
    ("operation", "counts"),
    [
        ("pageable", {"copy to the device, pageable": 1}),
        ("pinned", {"copy to the device, pinned": 1}),
        ("on the device", {"copy on the device": 1}),
        ("launch", {"launch": 1}),
        ("product", {"launch": 1}),
        ("replay", {"graph launch": 1, "graph nodes launched": 2}),
        ("read", {"copy from the device, pageable": 1, "wait": 1}),
        ("allocation", {"device allocation": 1, "launch": 1}),
    ],
)
def test_an_operation_is_counted_as_what_it_is(
    probed: dict[str, dict[str, Any]], operation: str, counts: dict[str, int]
) -> None:
    """Law: exactly these counts; a copy of 1000 numbers is one of 4000 bytes."""
    found = probed["counts"][operation]
    sizes = {name: n for name, n in found.items() if name.startswith("bytes of copy")}
    assert set(sizes.values()) <= {4000}
    assert len(sizes) == sum(name.startswith("copy") for name in counts)
    ignored = ("bytes of", "last graph nodes", "event", "query")
    assert {k: n for k, n in found.items() if not k.startswith(ignored)} == counts


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("wait", "wait for the device"),
        ("elsewhere", "launch on another stream"),
        ("read", "Cannot copy"),  # torch refuses before it calls the runtime
        ("pageable", "Cannot copy"),
    ],
)
def test_what_a_capture_forbids_is_reported(
    probed: dict[str, dict[str, Any]], operation: str, message: str
) -> None:
    """Law: a measurement without violations really had none."""
    assert any(message in violation for violation in probed["violations"][operation])


@pytest.mark.parametrize("operation", ["launch", "pinned"])
def test_what_a_capture_allows_is_not_reported(
    probed: dict[str, dict[str, Any]], operation: str
) -> None:
    """Law: the stand-in itself never causes a violation."""
    assert probed["violations"][operation] == []
