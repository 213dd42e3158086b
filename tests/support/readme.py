"""Sections of README.md that are generated and checked."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def section(name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`, without surrounding blank lines."""
    text = README.read_text(encoding="utf-8")
    _, opened, rest = text.partition(f"<!-- {name} -->")
    body, closed, _ = rest.partition(f"<!-- /{name} -->")
    assert opened, f"README.md has no section {name}"
    assert closed, f"README.md does not close its section {name}"
    return body.strip("\n")
