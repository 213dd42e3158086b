"""README's metrics table cannot drift from the registry."""

from __future__ import annotations

from server.observe import metrics_table
from tests.support.readme import section


def test_readme_lists_every_metric() -> None:
    """Law: between the markers stands what `python -m server.observe.metrics` prints."""
    assert section("metrics") == metrics_table.markdown()
