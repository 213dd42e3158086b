"""A server with an engine that says what its seed makes it, for each module of these tests, and a
client of it. A module whose server is another one has a fixture `served` of its own."""

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
    with httpx.Client(base_url=served.url) as http:
        yield http
