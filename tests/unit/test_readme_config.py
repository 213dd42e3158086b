"""README's configuration table cannot drift from the classes."""

from __future__ import annotations

from server import config_table
from tests.support.readme import section


def test_readme_lists_every_key() -> None:
    """Law: between the markers stands what `python -m server.config_table` prints."""
    assert section("config") == config_table.markdown()


def test_table_has_every_variant() -> None:
    """Law: nested tables and the keys of each variant of a union have their rows."""
    table = config_table.markdown()
    for key in ("server.port", "target.path", "speculation.proposer.n_max", "attention"):
        assert f"| `{key}` |" in table
    for k in ("k", "k_max"):
        assert f"| `speculation.controller.{k}` |" in table
