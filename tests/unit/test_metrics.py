"""Metrics: what one observation adds, and that the set of series never changes."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Estimates, StepMetrics, StepSeconds, Swap
from server.observe.exchange import Ended
from server.observe.metrics import Histogram, Metrics
from server.observe.metrics_table import METRICS, Finish


def samples(metrics: Metrics) -> dict[str, float]:
    """Map `name{label}`, without the prefix, to its value; leave out process metrics."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.name.startswith("process_"):
            continue
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            name = sample.name.removeprefix("foredraft_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


STEP = StepMetrics(
    step=9,
    seconds=StepSeconds(
        schedule=1, propose=2, verify=4, accept=8, commit=16, emit=32, propose_forward=1.5,
        verify_forward=3.0, around=64,
    ),
    plain_seconds=254,
    num_running=3, num_waiting=2, num_prompt_tokens=40, num_generated_tokens=7, num_sampling=3,
    num_proposed=6, num_accepted=4, proposed_at=[3, 2, 1], accepted_at=[3, 1, 0],
    k_counts=[0, 1, 0, 2], blocks_used=25, blocks_total=100, cached_tokens=16, queried_tokens=64,
    preemptions=1, by_proposer={"draft_model": (4, 3), "prediction": (2, 1)},
    proposed_behind=[3, 0, 0, 1], accepted_behind=[2, 0, 0, 1],
    swap=Swap("new", "taken_back", "it was worse", "old"),
    estimates=Estimates(
        mode="fixed", k=1, reason="fixed", rates=[100.0, 150.0, 200.0], speedup=1.5
    ),
)  # fmt: skip


def ended(finish: Finish, **fields: Any) -> Ended:
    return Ended(id="cmpl-1", finish=finish, began=0.0, **{"total": 0.5, **fields})


def by_the_table(step: StepMetrics) -> dict[str, float]:
    """Return what the rows that name a field of StepMetrics add, without zeros."""
    added = dict[str, float]()
    for metric in (one for one in METRICS if one.of):
        found = getattr(step, metric.of)
        counts = zip(metric.label_values, found if metric.label else [found], strict=False)
        for value, count in counts:
            added[f"{metric.name}{{{value}}}" if value else metric.name] = count
    return {name: count for name, count in added.items() if count}


def test_a_step_adds_its_sums() -> None:
    """Law: every field of StepMetrics is counted once, under its name and label. Rows of the table
    that are not named here add the field that they name."""
    metrics = Metrics()
    before = samples(metrics)
    metrics.observe_step(STEP)
    added = changes(before, samples(metrics))
    assert added == by_the_table(STEP) | {
        "requests_running": 3,
        "requests_waiting": 2,
        "kv_cache_usage_ratio": 0.25,
        "generation_tokens_total": 7,
        "prefill_tokens_total": 40,
        "prefix_cache_queried_tokens_total": 64,
        "prefix_cache_hit_tokens_total": 16,
        "preemptions_total": 1,
        "steps_total": 1,
        "step_seconds_total{schedule}": 1,
        "step_seconds_total{propose}": 2,
        "step_seconds_total{verify}": 4,
        "step_seconds_total{accept}": 8,
        "step_seconds_total{commit}": 16,
        "step_seconds_total{emit}": 32,
        "step_seconds_total{around}": 64,
        "step_seconds_total{forward}": 4.5,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total{draft_model}": 4,
        "spec_decode_num_draft_tokens_total{prediction}": 2,
        "spec_decode_num_accepted_tokens_total{draft_model}": 3,
        "spec_decode_num_accepted_tokens_total{prediction}": 1,
        "spec_decode_num_draft_tokens_per_pos_total{0}": 3,
        "spec_decode_num_draft_tokens_per_pos_total{1}": 2,
        "spec_decode_num_draft_tokens_per_pos_total{2}": 1,
        "spec_decode_num_accepted_tokens_per_pos_total{0}": 3,
        "spec_decode_num_accepted_tokens_per_pos_total{1}": 1,
        "spec_decode_num_draft_tokens_per_context_total{1k}": 3,
        "spec_decode_num_draft_tokens_per_context_total{longer}": 1,
        "spec_decode_num_accepted_tokens_per_context_total{1k}": 2,
        "spec_decode_num_accepted_tokens_per_context_total{longer}": 1,
        "spec_decode_chosen_k_total{1}": 1,
        "spec_decode_chosen_k_total{3}": 2,
        "spec_decode_num_wasted_tokens_total{draft_model}": 1,
        "spec_decode_num_wasted_tokens_total{prediction}": 1,
        "spec_decode_seconds_total{draft}": 1.5,
        "spec_decode_seconds_total{verify}": 3,
        "spec_decode_seconds_total{host}": 127 - 4.5,
        "spec_decode_compared_seconds_total{taken}": 127,
        "spec_decode_compared_seconds_total{plain}": 254,
        "spec_decode_decisions_total{fixed}": 1,
        "spec_decode_draft_swaps_total{taken_back}": 1,
        "spec_decode_mode{fixed}": 1,
        "spec_decode_estimated_speedup_ratio": 1.0,
        "spec_decode_main_proposer_speedup_ratio": 1.5,
        "spec_decode_estimated_regret_ratio": pytest.approx(200 / 150 - 1),
    }


def test_a_heartbeat_moves_gauges_only() -> None:
    """Law: an idle heartbeat does not count as a step."""
    metrics = Metrics()
    metrics.observe_step(STEP)
    before = samples(metrics)
    metrics.observe_step(StepMetrics(step=9, blocks_used=10, blocks_total=100))
    assert changes(before, samples(metrics)) == {
        "requests_running": -3,
        "requests_waiting": -2,
        "kv_cache_usage_ratio": 0.1 - 0.25,
        "spec_decode_mode{fixed}": -1,
        "spec_decode_mode{auto}": 1,
        "spec_decode_estimated_speedup_ratio": -1.0,
        "spec_decode_main_proposer_speedup_ratio": -0.5,
    }


def test_a_beat_before_the_cache_is_known() -> None:
    """Bug: dividing by zero before the number of blocks is known."""
    metrics = Metrics()
    metrics.observe_step(StepMetrics())
    assert samples(metrics)["kv_cache_usage_ratio"] == 0


def test_latencies_of_a_request() -> None:
    """Law: one TTFT and one end-to-end latency per request; one ITL observation per later token."""
    metrics = Metrics()
    metrics.observe_tokens(4, gap_seconds=0.2)
    metrics.observe_queue(0.02)
    metrics.observe_request(
        ended("stop", prompt_tokens=11, reply_tokens=7, first_token=0.05, total=1.5)
    )
    found = samples(metrics)
    assert found["request_queue_time_seconds_sum"] == 0.02
    assert found["request_prompt_tokens_sum"] == 11
    assert found["request_generation_tokens_sum"] == 7
    assert found["inter_token_latency_seconds_count"] == 4
    assert found["inter_token_latency_seconds_sum"] == 0.2
    assert found["time_to_first_token_seconds_sum"] == 0.05
    assert found["e2e_request_latency_seconds_sum"] == 1.5
    assert found["prompt_tokens_total"] == 11
    assert found["requests_total{stop}"] == 1
    metrics.observe_request(ended("abort"))
    found = samples(metrics)
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["e2e_request_latency_seconds_count"] == 2


def test_rejections_by_reason() -> None:
    """Law: a refused request is counted under its reason and nowhere else."""
    metrics = Metrics()
    before = samples(metrics)
    metrics.count_rejection("queue_full")
    assert changes(before, samples(metrics)) == {"rejected_requests_total{queue_full}": 1}


def test_grammars_by_outcome() -> None:
    """Law: a check is counted under its outcome, and its seconds are observed once."""
    metrics = Metrics()
    before = samples(metrics)
    metrics.observe_grammar("too_slow", 2.0)
    added = changes(before, samples(metrics))
    assert added.pop("grammar_checks_total{too_slow}") == 1
    assert added.pop("grammar_check_seconds_sum") == 2.0
    assert added.pop("grammar_check_seconds_count") == 1
    assert {name.partition("{")[0] for name in added} == {"grammar_check_seconds_bucket"}


def test_engine_state_is_one_hot_and_restarts_count() -> None:
    """Law: one state is 1; only `starting` after `lost` is a restart; after `lost` nothing runs."""
    metrics = Metrics()
    metrics.set_engine_state("starting")
    metrics.set_engine_state("ready")
    metrics.observe_step(STEP)
    metrics.set_engine_state("lost")
    found = samples(metrics)
    assert found["engine_state{lost}"] == 1
    assert found["engine_state{ready}"] == 0
    assert found["requests_running"] == 0
    metrics.set_engine_state("starting")
    assert samples(metrics)["engine_restarts_total"] == 1
    for state in ("ready", "starting"):  # replaced by an engine with another configuration
        metrics.set_engine_state(state)
    assert samples(metrics)["engine_restarts_total"] == 1


def test_series_are_fixed() -> None:
    """Law: all series exist from the start and none is added later; instances share nothing."""
    metrics, other = Metrics(), Metrics()
    before = samples(metrics)
    metrics.observe_step(STEP)
    metrics.set_engine_state("failed")
    metrics.count_rejection("invalid")
    metrics.observe_grammar("busy", 0.1)
    metrics.observe_queue(0.1)
    metrics.observe_request(ended("error"))
    assert samples(metrics).keys() == before.keys()
    assert samples(other)["steps_total"] == 0
    assert {name.partition("{")[0].removesuffix("_bucket").removesuffix("_count").removesuffix(
        "_sum") for name in before} == {metric.name for metric in METRICS}  # fmt: skip


def test_openmetrics_names_a_reply_of_each_bucket() -> None:
    """Law: each bucket's exemplar is the last reply in it, by its id in the log. A client that does
    not accept OpenMetrics gets plain text with the same counts and no exemplars."""
    metrics = Metrics()
    for name, seconds in (("cmpl-old", 0.3), ("cmpl-new", 0.3), ("cmpl-slow", 70.0)):
        metrics.observe_request(replace(ended("stop"), id=name, first_token=seconds))
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    body, kind = metrics.rendered(accept)
    assert kind.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    parse = openmetrics.text_string_to_metric_families
    families = list(parse(body.decode()))  # type: ignore[no-untyped-call]
    found = {f.name: f.samples for f in families}["foredraft_time_to_first_token_seconds"]
    named = {s.labels["le"]: s.exemplar for s in found if s.exemplar is not None}
    assert [(e.labels["reply"], e.value) for e in named.values()] == [
        ("cmpl-new", 0.3), ("cmpl-slow", 70.0)
    ]  # fmt: skip
    plain, kind = metrics.rendered("*/*")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b"cmpl-" not in plain
    ours = {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples
            if s.name.startswith("foredraft_")}  # fmt: skip
    same = [s for f in text_string_to_metric_families(plain.decode()) for s in f.samples
            if s.name.startswith("foredraft_")]  # fmt: skip
    assert ours == {(s.name, *sorted(s.labels.items())): s.value for s in same}


def test_every_series_names_its_model() -> None:
    """Law: every series of ours has the label `model_name`, which vLLM's dashboards select by."""
    families = text_string_to_metric_families(Metrics(model_name="m").render().decode())
    named = {s.labels.get("model_name") for f in families for s in f.samples
             if s.name.startswith("foredraft_")}  # fmt: skip
    assert named == {"m"}


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the figures are Linux's")
def test_both_processes_report_their_resource_use() -> None:
    """Law: memory, CPU seconds and open files are reported for the front end and the engine, but
    not for an engine that is not running."""
    pid: int | None = os.getpid()
    metrics = Metrics(engine=lambda: pid)
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds"):
        assert samples(metrics)[f"engine_process_{name}"] > 0
        assert f"\nprocess_{name} " in metrics.render().decode()
    pid = None
    assert not [name for name in samples(metrics) if name.startswith("engine_process")]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not here")
def test_promtool_finds_no_fault() -> None:
    """Law: names, types and help texts pass Prometheus' own linter."""
    metrics = Metrics()
    metrics.observe_step(STEP)
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.render(), capture_output=True
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")


def test_histograms_count_as_prometheus_s_do() -> None:
    """Law: a bound includes its value; values past the last bound and repeated values count."""
    bounds, values = (0.1, 0.5, 2.0), [(0.1, 1), (0.100001, 2), (0.5, 3), (7.0, 1), (0.0, 2)]
    registry = CollectorRegistry()
    ours, theirs = (
        Histogram(bounds),
        PrometheusHistogram("x", "", buckets=bounds, registry=registry),
    )
    for value, count in values:
        ours.observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    [family] = theirs.collect()
    expected = [s for s in family.samples if not s.name.endswith("_created")]
    assert ours.family("x", "").samples == expected


@pytest.mark.parametrize("version", ["abc", '"1.0.0"', "1..0", "\u00b2"])
def test_a_malformed_openmetrics_version_gets_plain_text(version: str) -> None:
    """Bug: a malformed version in `Accept` caused a 500 and a traceback in the log."""
    _, kind = Metrics().rendered(f"application/openmetrics-text;version={version}")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
