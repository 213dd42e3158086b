"""`python -m tests.cuda_host.rehearse`, on the stand-in: run the tests of `tests/gpu`, whose values
mean nothing here. Prints as one line of JSON each test's error, unless it is an assertion about a
value."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

VALUELESS = ("test_the_plan_holds",)  # it checks no value: memory is counted here, too


class Watch:
    """A pytest plugin. `ended`: the error of each test, or ""."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}

    def pytest_collection_finish(self) -> None:
        from tests.cuda_host.valueless import without_values  # pytest rewrites what it imports

        without_values()

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        known: str = self.ended.setdefault(item.nodeid, "")
        allowed = (pytest.skip.Exception, *(() if item.name in VALUELESS else (AssertionError,)))
        if call.excinfo and not call.excinfo.errisinstance(allowed):
            self.ended[item.nodeid] = known or call.excinfo.exconly()[:500]


def main() -> None:
    watch = Watch()
    with redirect_stdout(sys.stderr):
        pytest.main(["tests/gpu", "-m", "gpu", "--tb=short", *sys.argv[1:]], plugins=[watch])
    sys.stdout.write(json.dumps(watch.ended) + "\n")
    sys.stdout.flush()
    os._exit(0)  # skip exit handlers, so that no test's leftovers change the exit code


if __name__ == "__main__":
    main()
