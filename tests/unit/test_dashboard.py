"""Grafana's dashboards query what the server exposes, and together show all of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain, combinations
from pathlib import Path

import pytest

from server.observe.metrics_table import METRICS
from tests.support.promql import (
    BUILT_IN,
    BY,
    MODEL,
    PROCESS,
    TARGET,
    check,
    filled,
    groupings,
    needs_promtool,
    parse,
    selectors,
)

FOLDER = Path(__file__).parents[2] / "docker/grafana/dashboards"
DASHBOARDS = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.iterdir())
}
PANELS = {name: one["panels"] for name, one in DASHBOARDS.items()}
QUERIES = {
    f"{name}: {panel['title']} {query['refId']}": query
    for name, panels in PANELS.items()
    for panel in panels
    for query in panel["targets"]
}
EXPRESSIONS = [query["expr"] for query in QUERIES.values()]
ALL = [panel for panels in PANELS.values() for panel in panels]
WIDTH = 24

# Prompt tokens of ended requests: the token panel shows both parts as they happen. Draft swaps:
# an operator starts them and is told the outcome.
NOT_SHOWN = {"prompt_tokens_total", "spec_decode_draft_swaps_total"}


@pytest.mark.parametrize("name", QUERIES)
def test_every_name_exists(name: str) -> None:
    """Law: metrics, labels and label values are those of the table; counters are used as rates."""
    check(QUERIES[name]["expr"])


def test_every_metric_is_shown() -> None:
    """Law: every metric of the table is on a dashboard, so a new one needs a panel."""
    shown = {one.metric.name for expression in EXPRESSIONS for one in selectors(expression)}
    assert (shown | NOT_SHOWN) - PROCESS.keys() == {metric.name for metric in METRICS}
    assert not shown & NOT_SHOWN


@pytest.mark.parametrize("name", QUERIES)
def test_every_selector_follows_the_choice_of_replicas(name: str) -> None:
    """Law: a graph shows only the chosen replicas and, where series name one, models."""
    for one in selectors(QUERIES[name]["expr"]):
        names = [*TARGET, *([] if one.name in PROCESS else [MODEL])]
        assert {label: one.matchers[label] for label in names} == {n: f"${n}" for n in names}


@pytest.mark.parametrize("name", QUERIES)
def test_every_graph_is_summed_or_per_replica(name: str) -> None:
    """Law: one variable, which every aggregation obeys, lets the reader choose between the two."""
    sums = re.findall(r"\b(?:sum|avg|max|min)\b( by \(\$by\b| without)?", QUERIES[name]["expr"])
    assert sums
    assert all(sums)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_is_declared(name: str) -> None:
    """Law: `$name` is a variable of the dashboard or of Grafana, and a declared one is used."""
    variables = {one["name"]: one for one in DASHBOARDS[name]["templating"]["list"]}
    text = json.dumps([PANELS[name], *variables.values()])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all"}
    assert used - BUILT_IN.keys() == variables.keys()
    assert variables["datasource"]["type"] == "datasource"
    assert tuple(sorted(one["value"] for one in variables["by"]["options"])) == BY["$by"]
    for panel in PANELS[name]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for one in variables.values():
        if one["type"] == "query":
            [selected] = selectors(one["query"])
            assert re.fullmatch(rf"label_values\(.*, {one['name']}\)", one["query"])
            assert selected.metric.type == "gauge"


def test_dashboards_link_to_each_other() -> None:
    """Law: each has its own title and address, and a link to the others that keeps the chosen
    variables: all have the same."""
    assert len({one["uid"] for one in DASHBOARDS.values()}) == len(DASHBOARDS) == 4
    for name, one in DASHBOARDS.items():
        assert (one["uid"], one["title"]) == (f"foredraft-{name}", f"Foredraft: {name}")
        [link] = one["links"]
        assert link["includeVars"]
        assert link["tags"] == one["tags"]


@pytest.mark.parametrize("name", QUERIES)
def test_a_legend_names_labels_that_are_left(name: str) -> None:
    """Bug: series of one graph would have the same name, or an empty one."""
    query = QUERIES[name]
    left = groupings(re.sub(r"without \([^)]*\)", "", query["expr"])) - {"le"}
    assert set(re.findall(r"{{(\w+)}}", query["legendFormat"])) == left


def test_every_panel_says_how_to_read_it() -> None:
    """Law: each panel has its own title and one sentence that says when to worry."""
    for panels in PANELS.values():
        titles = Counter(panel["title"] for panel in panels)
        assert max(titles.values()) == 1, titles
    for panel in ALL:
        description = panel["description"]
        assert description.endswith("."), panel["title"]
        assert ". " not in description, panel["title"]
        assert "worry" in description, panel["title"]


def test_panels_have_their_places() -> None:
    """Law: ids are unique; no two panels overlap, and none exceeds the page."""
    for panel in ALL:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= WIDTH, panel["title"]
    for panels in PANELS.values():
        ids = Counter(panel["id"] for panel in panels)
        assert max(ids.values()) == 1, ids
    for one, other in chain.from_iterable(combinations(panels, 2) for panels in PANELS.values()):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or apart, (one["title"], other["title"])


def test_queries_of_a_panel_have_their_letters() -> None:
    """Bug: of two queries with the same letter, one is lost."""
    for panel in ALL:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == ["A", "B", "C"][: len(letters)], panel["title"]


@needs_promtool
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    """Law: every expression is valid PromQL, whichever replicas are chosen."""
    chosen = {"job": ".*", "instance": r"127\\.0\\.0\\.1:8000|b:1", MODEL: "a|b"}
    for by in BY["$by"]:
        parse((filled(one, **chosen, by=by) for one in EXPRESSIONS), tmp_path)
