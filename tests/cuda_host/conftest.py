"""One measurement for all tests of this tier; its table is printed at the end of the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import run
from tests.cuda_host.limits import lines

_FOUND = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the results of `tests.cuda_host.measure`."""
    figures: dict[str, Any] = json.loads(run("-m", "tests.cuda_host.measure"))
    request.config.stash[_FOUND] = figures
    return figures


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    figures = config.stash.get(_FOUND, None)
    if figures is not None:
        terminalreporter.section("asked of the device")
        for line in lines(figures):
            terminalreporter.write_line(line)
