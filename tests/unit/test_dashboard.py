"""Grafana's dashboard asks for what the server exposes, and shows all of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from server.observe.metrics_table import METRICS
from tests.support.promql import check, groupings, needs_promtool, parse, selectors

FILE = Path(__file__).parents[2] / "docker/grafana/dashboards/foredraft.json"
DASHBOARD = json.loads(FILE.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES = {f"{panel['title']} {one['refId']}": one for panel in GRAPHS for one in panel["targets"]}
EXPRESSIONS = [query["expr"] for query in QUERIES.values()]
BUILT_IN = {"__rate_interval": "1m", "__range": "1h"}  # of Grafana, and what they may stand for
WIDTH = 24

# Prompt tokens of ended requests: the panel of tokens shows its two parts as they happen. Swaps are
# an operator's, who is told what becomes of them.
NOT_SHOWN = {"prompt_tokens_total", "spec_decode_draft_swaps_total"}


@pytest.mark.parametrize("name", QUERIES)
def test_every_name_exists(name: str) -> None:
    """Law: metrics, labels and their values are those of the table; counters are made rates."""
    check(QUERIES[name]["expr"])


def test_every_metric_is_shown() -> None:
    """Law: a metric that is new in the table has to find its place here."""
    shown = {one.metric.name for expression in EXPRESSIONS for one in selectors(expression)}
    assert shown | NOT_SHOWN == {metric.name for metric in METRICS}
    assert not shown & NOT_SHOWN


@pytest.mark.parametrize("name", QUERIES)
def test_every_selector_follows_the_choice_of_replicas(name: str) -> None:
    """Law: no graph shows replicas that were not chosen."""
    for one in selectors(QUERIES[name]["expr"]):
        assert (one.matchers["job"], one.matchers["instance"]) == ("$job", "$instance"), one.name


def test_every_variable_is_declared() -> None:
    """Law: `$name` is a variable of the dashboard or of Grafana, and a declared one is used."""
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    text = json.dumps([PANELS, *variables.values()])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all"}
    assert used - BUILT_IN.keys() == variables.keys()
    assert variables["datasource"]["type"] == "datasource"
    for panel in GRAPHS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for one in variables.values():
        if one["type"] == "query":
            [selected] = selectors(one["query"])
            assert re.fullmatch(r"label_values\(.*, (job|instance)\)", one["query"])
            assert selected.metric.type == "gauge"


@pytest.mark.parametrize("name", QUERIES)
def test_a_legend_names_labels_that_are_left(name: str) -> None:
    """Bug to avoid: series that all have the same name, or an empty one."""
    query = QUERIES[name]
    left = groupings(query["expr"]) - {"le"}
    if not re.search(r"\b(sum|avg)\b", query["expr"]):
        left = {"instance"}
    assert set(re.findall(r"{{(\w+)}}", query.get("legendFormat", ""))) == left


def test_every_panel_says_how_to_read_it() -> None:
    """Law: a title of its own, and one sentence that says when to worry."""
    titles = Counter(panel["title"] for panel in PANELS)
    assert max(titles.values()) == 1, titles
    for panel in GRAPHS:
        said = panel["description"]
        assert said.endswith("."), panel["title"]
        assert ". " not in said, panel["title"]
        assert "worry" in said, panel["title"]


def test_panels_have_their_places() -> None:
    """Law: ids are unique; no two panels overlap, and none leaves the page."""
    ids = Counter(panel["id"] for panel in PANELS)
    assert max(ids.values()) == 1, ids
    for panel in PANELS:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= WIDTH, panel["title"]
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or apart, (one["title"], other["title"])


def test_queries_of_a_panel_have_their_letters() -> None:
    """Bug to avoid: two queries of one letter, of which one is lost."""
    for panel in GRAPHS:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == ["A", "B", "C"][: len(letters)], panel["title"]


@needs_promtool
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    """Law: with any replicas chosen, each is PromQL."""
    stand_in = {**BUILT_IN, "job": ".*", "instance": r"127\\.0\\.0\\.1:8000|b:1"}
    parse((_filled(one, stand_in) for one in EXPRESSIONS), tmp_path)


def _filled(expression: str, values: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)
