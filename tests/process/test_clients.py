"""The clients of the development environment run their scripts against the built-in pair; `python
-m tests.clients` runs the others. The table of docs/clients.md must match the runner's.
"""

from __future__ import annotations

import sys

import pytest

from tests.clients.__main__ import CLIENTS, HERE, ROOT, STEPS, ask, table

HELD = ("openai", "langchain", "litellm")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clients_at_hand(pair_url: str) -> None:
    """Law: every step of a client reports something, and none fails."""
    for name in HELD:
        outcome = ask([sys.executable, str(HERE / "python" / CLIENTS[name].script), pair_url])
        assert not outcome.errors, (name, outcome.errors)
        assert tuple(outcome.results) == STEPS


def test_the_document_has_the_table_of_the_runner() -> None:
    """Law: the same columns, and every client with its package, in the runner's order."""
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    lines = text.partition("<!-- clients -->\n")[2].partition("<!-- /clients -->")[0].splitlines()
    names = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines[2:]]
    assert lines[:2] == table({}).splitlines()
    assert names == [[name, client.package] for name, client in CLIENTS.items()]
