"""What the tests of /v1/responses share: a request, an item of its input, and a server to ask.

The fixtures become a module's own by assignment: `served, http = responses.served, responses.http`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 7, "seed": 3}
SAID: dict[str, Any] = {
    "type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeClient(tokens_per_step=3)) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url) as http:
        yield http
