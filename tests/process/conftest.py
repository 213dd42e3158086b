"""One server with the built-in pair for all tests of a worker that change nothing of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator

import pytest

from tests.process.served import serving

COMMAND = (sys.executable, "-m", "server", "serve", "--port", "0",
           "--set", "server.allow_priority=true")  # fmt: skip


@pytest.fixture(scope="package")
def pair_url() -> Iterator[str]:
    """Return its base URL, without `/v1`. Starting one takes ten seconds."""
    with asyncio.Runner() as runner:
        context = serving(COMMAND, {**os.environ, "OMP_NUM_THREADS": "1"})
        server = runner.run(context.__aenter__())
        yield str(server.http.base_url).rstrip("/")
        runner.run(context.__aexit__(None, None, None))
