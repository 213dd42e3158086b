"""The clients of the development environment run their scripts against the built-in pair; `python
-m tests.clients` runs the others. The table of docs/clients.md must match the runner's.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.clients.__main__ import CLIENTS, HERE, ROOT, STEPS, ask, table
from tests.process.served import serving

HELD = ("openai", "langchain", "litellm")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_at_hand() -> None:
    """Law: every step of a client reports something, and none fails."""

    async def scenario() -> None:
        command = (sys.executable, "-m", "server", "serve", "--set", "server.port=0")
        async with serving(command, {**os.environ, "OMP_NUM_THREADS": "1"}) as server:
            url = str(server.http.base_url).rstrip("/")
            for name in HELD:
                script = str(HERE / "python" / CLIENTS[name].script)
                outcome = await asyncio.to_thread(ask, [sys.executable, script, url])
                assert not outcome.errors, (name, outcome.errors)
                assert tuple(outcome.results) == STEPS

    asyncio.run(scenario())


def test_the_document_has_the_table_of_the_runner() -> None:
    """Law: the same columns, and every client with its package, in the runner's order."""
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    lines = text.partition("<!-- clients -->\n")[2].partition("<!-- /clients -->")[0].splitlines()
    names = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines[2:]]
    assert lines[:2] == table({}).splitlines()
    assert names == [[name, client.package] for name, client in CLIENTS.items()]
