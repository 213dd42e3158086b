"""The documents, and their generated sections."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FOLDER_PAGES = sorted(page for top in ("engine", "server") for page in ROOT.glob(f"{top}/**/*.md"))


def section(name: str) -> str:
    """The text in README or docs between `<!-- name -->` and `<!-- /name -->`, without surrounding
    blank lines."""
    mark = re.compile(rf"<!-- {name} -->(.*?)<!-- /{name} -->", re.DOTALL)
    found = [text for page in PAGES for text in mark.findall(page.read_text(encoding="utf-8"))]
    assert len(found) == 1, f"{len(found)} pages have a section {name}"
    body: str = found[0]
    return body.strip("\n")
