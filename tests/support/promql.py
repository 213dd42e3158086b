"""Metrics, matchers and groupings of the PromQL expressions used in this repository."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from server.observe.metrics_table import METRICS, Metric

TARGET = frozenset({"job", "instance"})  # labels that a scrape adds
MODEL = "model_name"  # a label of all our metrics, but not of the process metrics
BY = {"$by": ("instance", MODEL)}  # a dashboard's variable, and its values
PREFIX = "foredraft_"
PROCESS = {
    (name := f"{prefix}process_{of}"): Metric("counter" if "total" in of else "gauge", name, "")
    for prefix in ("", "engine_")
    for of in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds")
}
TABLE = {**PROCESS, **{metric.name: metric for metric in METRICS}}
BUILT_IN = {"__rate_interval": "1m", "__range": "1h"}  # Grafana's variables, with possible values
SUFFIXES = ("_bucket", "_sum", "_count")
SELECTOR = re.compile(r"(\w+\()?\b((?:foredraft|process)_\w+)(?:\{([^}]*)\})?(\[)?")
MATCHER = re.compile(r"(\w+)(=~|!~|!=|=)(['\"])(.*?)\3")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Prometheus) is not here"
)


@dataclass(frozen=True)
class Selected:
    """One selector of an expression. `name`: as exposed, without the prefix."""

    name: str
    metric: Metric
    matchers: dict[str, str]  # label -> value or pattern
    function: str  # applied to it directly, or empty
    over_time: bool


def selectors(expression: str) -> Iterator[Selected]:
    """Yield every selector of one of our metrics. Raises KeyError for an unknown metric."""
    for function, exposed, inside, over in SELECTOR.findall(expression):
        name = exposed.removeprefix(PREFIX)
        matchers = {label: value for label, _, _, value in MATCHER.findall(inside)}
        yield Selected(name, _metric(name), matchers, function.rstrip("("), bool(over))


def _metric(name: str) -> Metric:
    for suffix in SUFFIXES:
        metric = TABLE.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if metric is not None and metric.type == "histogram":
            return metric
    found = TABLE[name]
    assert found.type != "histogram", f"{name} has series _bucket, _sum and _count only"
    return found


def groupings(expression: str) -> set[str]:
    """Return the labels in `by (...)`, `without (...)`, `on (...)` and `ignoring(...)`."""
    found = re.findall(r"\b(?:by|without|ignoring|on) ?\(([^)]*)\)", expression)
    named = {label.strip() for labels in found for label in labels.split(",")}
    return {label for one in named for label in BY.get(one, (one,))}


def labels_of(selected: Selected) -> dict[str, tuple[str, ...]]:
    """Return label -> its values; empty if these are unknown here."""
    unknown: tuple[str, ...] = ()
    labels = {**selected.metric.labels, **dict.fromkeys(TARGET, unknown)}
    if selected.metric.name not in PROCESS:
        labels[MODEL] = unknown
    return {**labels, "le": unknown} if selected.name.endswith("_bucket") else labels


def check(expression: str) -> None:
    """Raise AssertionError or KeyError if a metric, label or label value does not exist, if a
    counter is used without a rate, or a gauge with one."""
    found = list(selectors(expression))
    known: set[str] = set()
    for one in found:
        labels = labels_of(one)
        known |= {*labels, MODEL}  # always allowed: without the label all is one group
        for label, value in one.matchers.items():
            assert label in labels, f"{one.name} has no label {label}"
            assert not labels[label] or value in labels[label], f"{one.name}: {label}={value}"
        rate = one.function in ("rate", "increase")
        assert rate == (one.metric.type != "gauge"), f"{one.name} as {one.function or 'it is'}"
        assert one.over_time or not rate, f"{one.name}: {one.function} over what time?"
    assert not found or groupings(expression) <= known, f"{expression} groups by no label"


def filled(expression: str, **values: str) -> str:
    """Return the expression with its variables replaced by `values` or Grafana's own."""
    known = {**BUILT_IN, **values}
    return re.sub(r"\$(\w+)", lambda match: known[match[1]], expression)


def parse(expressions: Iterable[str], folder: Path) -> None:
    """Check the expressions with Prometheus itself, as a rules file in `folder`."""
    rules = [{"record": f"expression:{i}", "expr": one} for i, one in enumerate(expressions)]
    file = folder / "rules.json"  # JSON is valid YAML
    file.write_text(json.dumps({"groups": [{"name": "expressions", "rules": rules}]}))
    promtool("check", "rules", str(file))


def promtool(*arguments: str) -> None:
    """Run promtool. Raises AssertionError with its output if it fails."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
