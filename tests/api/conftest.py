"""Fixtures: one server per test module, whose engine derives its text from the seed, and a client
of it. A module that needs another server defines its own fixture `served`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.fake_client import FakeClient
from tests.support.serving import Served, serve


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeClient(tokens_per_step=3)) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as http:
        yield http
