"""The documents stay short, their links resolve, and their tables match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server import config_table
from server.api import field_table
from server.observe import metrics_table
from tests.support.documents import FOLDER_PAGES, PAGES, ROOT, section

ALL = [*PAGES, *FOLDER_PAGES]
LONGEST_README, LONGEST_FOLDER_PAGE = 250, 120
MODEL_CARD = ROOT / "engine" / "demo" / "README.md"


def lines(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").splitlines())


def test_the_readme_is_short() -> None:
    """Law: the README has one or two screens and links; the rest is in docs/."""
    assert lines(ROOT / "README.md") <= LONGEST_README


@pytest.mark.parametrize(
    "page", [page for page in FOLDER_PAGES if page != MODEL_CARD], ids=lambda page: page.parent.name
)
def test_folder_pages_are_short(page: Path) -> None:
    """Law: a folder's page is a map of the folder. Reasons and figures are in docs/."""
    assert lines(page) <= LONGEST_FOLDER_PAGE


def test_decisions_are_short() -> None:
    """Law: a decision has at most five lines of at most 130 characters; figures are in results."""
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    for decision in re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE):
        assert len(decision.splitlines()) <= 5, decision
        assert max(map(len, decision.splitlines())) <= 130, decision


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Law: a relative link names an existing file, and its fragment a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = page if not name else page.parent / name
        assert file.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings]
            assert fragment in slugs, target


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_modules_exist(page: Path) -> None:
    """Law: a `python -m` in the text can be run, and a path in backticks exists."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"python -m ((?:engine|server|tests)(?:\.\w+)*)", text):
        file = ROOT / name.replace(".", "/")
        assert file.is_dir() or file.with_suffix(".py").is_file(), name
    for name in re.findall(r"`((?:engine|server|tests|docker|configs)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_key_of_the_configuration_is_listed() -> None:
    """Law: the text between the markers is what `python -m server.config_table` prints."""
    assert section("config") == config_table.markdown()


def test_every_metric_is_listed() -> None:
    """Law: the text between the markers is what `python -m server.observe.metrics_table` prints."""
    assert section("metrics") == metrics_table.markdown()


def test_every_field_is_listed() -> None:
    """Law: the text between the markers is what `python -m server.api.field_table` prints."""
    assert section("fields").strip() == field_table.markdown()


def test_every_alert_is_listed() -> None:
    """Law: docs/operations.md lists exactly the alerts of docker/alerts.yaml."""
    rules = (ROOT / "docker" / "alerts.yaml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Foredraft\w+)` \|", page, re.M) == re.findall(r"alert: (\w+)", rules)


def test_the_configuration_table_has_every_variant() -> None:
    """Law: nested tables and the keys of every variant of a union have rows."""
    table = config_table.markdown()
    for key in ("server.port", "target.path", "speculation.proposer.n_max", "attention"):
        assert f"| `{key}` |" in table
    for k in ("k", "k_max"):
        assert f"| `speculation.controller.{k}` |" in table


def test_a_page_says_where_its_command_is() -> None:
    """Bug: readers who followed a page literally got `foredraft: command not found`."""
    for page in PAGES:
        before, found, _ = page.read_text(encoding="utf-8").partition("\n$ foredraft ")
        assert not found or 'export PATH="$PWD/.venv/bin:$PATH"' in before, page.name
