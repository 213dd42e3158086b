"""README's table of request fields is the rendering of the table in code."""

from __future__ import annotations

from pathlib import Path

from server.api.fields import markdown

README = Path(__file__).parents[2] / "README.md"


def test_readme_has_the_table_of_fields() -> None:
    """What users read is what the server does: paste `python -m server.api.fields`."""
    text = README.read_text("utf-8")
    begin, end = "<!-- fields -->", "<!-- /fields -->"
    assert begin in text
    assert end in text
    assert text.partition(begin)[2].partition(end)[0].strip() == markdown()
