"""The Prometheus registry: what is counted, under which name. One registry per instance.

Counters live here, in the front end, so they survive an engine restart. Sums only: rates and
ratios are PromQL's. Label values come from fixed sets, so no request can add a series. The table
METRICS is the only place where a metric is declared; README's table is its rendering.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from engine.messages import PROPOSERS, StepMetrics
from server.engine_client import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Finish = Literal["stop", "length", "abort", "error"]
Rejection = Literal[
    "invalid", "context_length", "unauthorized", "unknown_model", "too_large", "queue_full",
    "not_ready",
]  # fmt: skip
PARTS = ("schedule", "propose", "verify", "accept", "commit", "emit", "forward")
MAX_DEPTH = 16  # the largest K a config may name

LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
BETWEEN = (0.0001, 0.00025, 0.0005, *LATENCY[:-3])
DURATION = (*LATENCY[3:], 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class Metric:
    """`name` is without the prefix, as on the wire. `labels`: each label and its values."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()


_POSITIONS = {"position": tuple(str(i) for i in range(MAX_DEPTH))}

METRICS: tuple[Metric, ...] = (
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "from the arrival of a request to its first token",
        buckets=LATENCY,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "time since the previous delivery divided by the tokens delivered, once per token",
        buckets=BETWEEN,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "from the arrival of a request to its end",
        buckets=DURATION,
    ),
    Metric("prompt_tokens_total", "counter", "prompt tokens of ended requests, cached ones too"),
    Metric("generation_tokens_total", "counter", "tokens generated, by the engine's count"),
    Metric(
        "requests_total",
        "counter",
        "ended requests by how they ended; `abort`: the client went away",
        {"reason": get_args(Finish)},
    ),
    Metric(
        "rejected_requests_total",
        "counter",
        "requests that never reached the engine, by reason",
        {"reason": get_args(Rejection)},
    ),
    Metric("requests_running", "gauge", "sequences in the batch"),
    Metric("requests_waiting", "gauge", "sequences queued in the engine"),
    Metric("kv_cache_usage_ratio", "gauge", "blocks in use, of all blocks"),
    Metric("prefix_cache_queried_tokens_total", "counter", "prompt tokens looked up"),
    Metric("prefix_cache_hit_tokens_total", "counter", "of those, found and not computed again"),
    Metric("preemptions_total", "counter", "sequences put back into the queue for want of blocks"),
    Metric("steps_total", "counter", "engine steps"),
    Metric("prefill_tokens_total", "counter", "prompt positions computed"),
    Metric(
        "step_seconds_total",
        "counter",
        "seconds by part of a step; `forward` is the time in model forwards, contained in propose"
        " and verify",
        {"part": PARTS},
    ),
    Metric("spec_decode_num_drafts_total", "counter", "rounds: sequences that sampled, K = 0 too"),
    Metric(
        "spec_decode_num_draft_tokens_total",
        "counter",
        "tokens proposed and verified, by who guessed them",
        {"proposer": PROPOSERS},
    ),
    Metric(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "of those, kept",
        {"proposer": PROPOSERS},
    ),
    Metric(
        "spec_decode_num_draft_tokens_per_pos_total",
        "counter",
        "proposals that reached this position; 0 is the first guess",
        _POSITIONS,
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "proposals kept at this position",
        _POSITIONS,
    ),
    Metric(
        "spec_decode_chosen_k_total",
        "counter",
        "rounds by the K that the controller chose",
        {"k": tuple(str(k) for k in range(MAX_DEPTH + 1))},
    ),
    Metric(
        "engine_state",
        "gauge",
        "1 for the present state of the engine, 0 for the others",
        {"state": get_args(EngineState)},
    ),
    Metric("engine_restarts_total", "counter", "times the engine process was started again"),
)


@dataclass(frozen=True)
class RequestTimes:
    """An ended request, n choices and all. Seconds since its arrival; None: no token came."""

    finish: Finish
    prompt_tokens: int
    first_token_seconds: float | None
    total_seconds: float


class Metrics:
    """Not thread-safe by need: everything happens in the event loop."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        made = {metric.name: _build(metric, self._registry) for metric in METRICS}
        self._counters = {n: m for n, m in made.items() if isinstance(m, Counter)}
        self._gauges = {n: m for n, m in made.items() if isinstance(m, Gauge)}
        self._histograms = {n: m for n, m in made.items() if isinstance(m, Histogram)}
        self._state: EngineState | None = None

    def render(self) -> bytes:
        """The exposition format, of CONTENT_TYPE."""
        return generate_latest(self._registry)

    def observe_step(self, metrics: StepMetrics) -> None:
        """One step, or an idle heartbeat (whose sums are zero)."""
        self._gauges["requests_running"].set(metrics.num_running)
        self._gauges["requests_waiting"].set(metrics.num_waiting)
        self._gauges["kv_cache_usage_ratio"].set(
            metrics.blocks_used / metrics.blocks_total if metrics.blocks_total else 0.0
        )
        for name, amount in (
            ("generation_tokens_total", metrics.num_generated_tokens),
            ("prefill_tokens_total", metrics.num_prompt_tokens),
            ("prefix_cache_queried_tokens_total", metrics.queried_tokens),
            ("prefix_cache_hit_tokens_total", metrics.cached_tokens),
            ("preemptions_total", metrics.preemptions),
            ("spec_decode_num_drafts_total", metrics.num_sampling),
        ):
            self._add(name, amount)
        for proposer, (proposed, accepted) in metrics.by_proposer.items():
            for name, amount in (
                ("spec_decode_num_draft_tokens_total", proposed),
                ("spec_decode_num_accepted_tokens_total", accepted),
            ):
                self._counters[name].labels(proposer).inc(amount)
        self._add_each("spec_decode_num_draft_tokens_per_pos_total", metrics.proposed_at)
        self._add_each("spec_decode_num_accepted_tokens_per_pos_total", metrics.accepted_at)
        self._add_each("spec_decode_chosen_k_total", metrics.k_counts)
        if metrics.num_sampling or metrics.num_prompt_tokens:
            self._observe_seconds(metrics)

    def observe_tokens(self, count: int, *, gap_seconds: float) -> None:
        """`count` tokens arrived together, `gap_seconds` after the delivery before. Not for the
        first delivery, which has no predecessor."""
        for _ in range(count):
            self._histograms["inter_token_latency_seconds"].observe(gap_seconds / count)

    def observe_request(self, times: RequestTimes) -> None:
        """One request ended, in whichever way."""
        self._counters["requests_total"].labels(times.finish).inc()
        self._add("prompt_tokens_total", times.prompt_tokens)
        if times.first_token_seconds is not None:
            self._histograms["time_to_first_token_seconds"].observe(times.first_token_seconds)
        self._histograms["e2e_request_latency_seconds"].observe(times.total_seconds)

    def count_rejection(self, reason: Rejection) -> None:
        """One request was refused before it reached the engine."""
        self._counters["rejected_requests_total"].labels(reason).inc()

    def set_engine_state(self, state: EngineState) -> None:
        """The engine's state changed; `starting` after `lost` is a restart."""
        if self._state == "lost" and state == "starting":
            self._counters["engine_restarts_total"].inc()
        self._state = state
        for name in get_args(EngineState):
            self._gauges["engine_state"].labels(name).set(float(name == state))
        if state != "ready":
            for gauge in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
                self._gauges[gauge].set(0)

    def _add(self, name: str, amount: float) -> None:
        if amount:
            self._counters[name].inc(amount)

    def _add_each(self, name: str, amounts: list[int]) -> None:
        for index, amount in enumerate(amounts):
            if amount:
                self._counters[name].labels(str(index)).inc(amount)

    def _observe_seconds(self, metrics: StepMetrics) -> None:
        seconds = metrics.seconds
        self._counters["steps_total"].inc()
        for part in PARTS:
            forward = seconds.propose_forward + seconds.verify_forward
            value = forward if part == "forward" else getattr(seconds, part)
            self._counters["step_seconds_total"].labels(part).inc(value)


def markdown() -> str:
    """README's table: one line per metric."""
    head = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows = [
        f"| `foretoken_{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)}"
        f" | {m.meaning} |"
        for m in METRICS
    ]
    return "\n".join([*head, *rows])


def _build(metric: Metric, registry: CollectorRegistry) -> Collector:
    """All label values exist from the start, at zero, so that rates see the first event."""
    name, labels = f"foretoken_{metric.name}", tuple(metric.labels)
    made: Counter | Gauge | Histogram
    if metric.type == "counter":
        made = Counter(name, metric.meaning, labels, registry=registry)
    elif metric.type == "gauge":
        made = Gauge(name, metric.meaning, labels, registry=registry)
    else:
        made = Histogram(name, metric.meaning, labels, registry=registry, buckets=metric.buckets)
    for values in metric.labels.values():
        for value in values:
            made.labels(value)
    return made


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
