"""The Prometheus registry: what is counted, under which name. One registry per instance.

Counters live here, in the front end, so they survive an engine restart. Sums only: rates and
ratios are PromQL's. Label values come from fixed sets, so no request can add a series. What there
is, is declared in `metrics_table`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import attrgetter
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.messages import CheckOutcome, Mode, StepMetrics
from server.engine.lifecycle import EngineState
from server.observe.metrics_table import METRICS, PARTS, SHARES, Finish, Metric, Rejection, markdown
from server.observe.speculation import Gain, RecentAcceptance, Regret, compared

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STEPS_AT_ONCE = 16  # counted together: half the work of one by one, and no pause that is noticed
SUMS = {  # counter -> field of StepMetrics
    "generation_tokens_total": "num_generated_tokens",
    "prefill_tokens_total": "num_prompt_tokens",
    "prefix_cache_queried_tokens_total": "queried_tokens",
    "prefix_cache_hit_tokens_total": "cached_tokens",
    "preemptions_total": "preemptions",
    "spec_decode_num_drafts_total": "num_sampling",
}
SUMS_EACH = {  # counter by position or K -> field of StepMetrics, a list
    "spec_decode_num_draft_tokens_per_pos_total": "proposed_at",
    "spec_decode_num_accepted_tokens_per_pos_total": "accepted_at",
    "spec_decode_chosen_k_total": "k_counts",
}


@dataclass(frozen=True)
class RequestTimes:
    """An ended request, n choices and all. Seconds since its arrival; None: no token came."""

    finish: Finish
    prompt_tokens: int
    first_token_seconds: float | None
    total_seconds: float


class Tally(Collector):
    """A histogram without labels for what happens at every token: prometheus_client's takes longer
    than the token's way to its client. Bounds include their values, as there."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self._name, self._meaning, self._bounds = name, meaning, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """The same value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._meaning, buckets, self._sum)


class Metrics:
    """Not thread-safe by need: everything happens in the event loop.

    Steps are counted several at a time, into plain sums, which `render` hands to prometheus_client:
    its locks and checks, and then sums for each step alone, took as long as the rest of its way
    through the front end.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {m.name: _build(m, self._registry) for m in METRICS}
        self._token_gaps: Tally = made["inter_token_latency_seconds"]
        self._counters = {n: m for n, m in made.items() if isinstance(m, Counter)}
        self._gauges = {n: m for n, m in made.items() if isinstance(m, Gauge)}
        self._histograms = {n: m for n, m in made.items() if isinstance(m, Histogram)}
        # By name and label value, since `labels()` takes longer than what is done with its result.
        self._labelled: dict[tuple[str, str], Any] = {
            (metric.name, value): made[metric.name].labels(value)
            for metric in METRICS
            for values in metric.labels.values()
            for value in values
        }
        self._sums: dict[tuple[str, str | None], float] = {}  # not yet in a counter
        self._levels: dict[str, float] = {}  # not yet in a gauge
        self._state: EngineState | None = None
        self._mode: Mode | None = None
        self._steps: list[StepMetrics] = []  # not yet counted
        self._regret, self._kept, self._gain = Regret(), RecentAcceptance(), Gain()

    def render(self) -> bytes:
        """The exposition format, of CONTENT_TYPE."""
        self._count_steps()
        self._hand_over()
        return generate_latest(self._registry)

    def observe_step(self, metrics: StepMetrics) -> None:
        """One step, or an idle heartbeat (whose sums are zero)."""
        self._steps.append(metrics)
        if len(self._steps) == STEPS_AT_ONCE:
            self._count_steps()

    @property
    def regret(self) -> Regret:
        self._count_steps()
        return self._regret

    @property
    def kept(self) -> RecentAcceptance:
        self._count_steps()
        return self._kept

    @property
    def gain(self) -> Gain:
        self._count_steps()
        return self._gain

    def observe_tokens(self, count: int, *, gap_seconds: float) -> None:
        """`count` tokens arrived together, `gap_seconds` after the delivery before. Not for the
        first delivery, which has no predecessor."""
        self._token_gaps.observe(gap_seconds / count, count)

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

    def observe_grammar(self, outcome: CheckOutcome, seconds: float) -> None:
        """A grammar was compiled ahead of its request, or there was no time for it."""
        self._add("grammar_checks_total", 1, outcome)
        self._histograms["grammar_check_seconds"].observe(seconds)

    def set_engine_state(self, state: EngineState) -> None:
        """The engine's state changed; `starting` after `lost` is a restart."""
        self._count_steps()  # which say how much ran
        if self._state == "lost" and state == "starting":
            self._counters["engine_restarts_total"].inc()
        self._state = state
        for name in get_args(EngineState):
            self._gauges["engine_state"].labels(name).set(float(name == state))
        if state != "ready":
            for gauge in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
                self._levels[gauge] = 0

    def _add(self, name: str, amount: float, label: str | None = None) -> None:
        if amount:
            key = name, label
            self._sums[key] = self._sums.get(key, 0.0) + amount

    def _hand_over(self) -> None:
        for (name, label), amount in self._sums.items():
            counter = self._counters[name] if label is None else self._labelled[name, label]
            counter.inc(amount)
        for name, value in self._levels.items():
            self._gauges[name].set(value)
        self._sums, self._levels = {}, {}
        self._gauges["spec_decode_estimated_regret_ratio"].set(self._regret.value)
        self._gauges["spec_decode_estimated_speedup_ratio"].set(self._gain.speedup or 1.0)

    def _count_steps(self) -> None:
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        for name, field in SUMS.items():
            self._add(name, sum(map(attrgetter(field), steps)))
        for name, field in SUMS_EACH.items():
            columns = zip_longest(*map(attrgetter(field), steps), fillvalue=0)
            for index, column in enumerate(columns):
                self._add(name, sum(column), str(index))
        self._count_proposers(steps)
        self._count_seconds([s for s in steps if s.num_sampling or s.num_prompt_tokens])
        self._gain.observe(steps)
        for step in steps:
            self._kept.observe(step.proposed_at, step.accepted_at)
            if step.num_sampling:
                self._regret.observe(step.estimates, step.num_generated_tokens)
        for reason, count in Counts(s.estimates.reason for s in steps if s.num_sampling).items():
            self._add("spec_decode_decisions_total", count, reason)
        self._show(steps[-1])

    def _count_proposers(self, steps: Sequence[StepMetrics]) -> None:
        for step in steps:
            for proposer, (proposed, accepted) in step.by_proposer.items():
                self._add("spec_decode_num_draft_tokens_total", proposed, proposer)
                self._add("spec_decode_num_accepted_tokens_total", accepted, proposer)
                self._add("spec_decode_num_wasted_tokens_total", proposed - accepted, proposer)

    def _count_seconds(self, steps: Sequence[StepMetrics]) -> None:
        seconds = [step.seconds for step in steps]
        drafting = sum(s.propose_forward for s in seconds)
        verifying = sum(s.verify_forward for s in seconds)
        self._add("steps_total", len(steps))
        self._add("step_seconds_total", drafting + verifying, "forward")
        for step in steps:
            taken, plain = compared(step)
            self._add("spec_decode_compared_seconds_total", taken, "taken")
            self._add("spec_decode_compared_seconds_total", plain, "plain")
        whole = 0.0
        for part in PARTS[:-1]:
            value = sum(map(attrgetter(part), seconds))
            whole += value
            self._add("step_seconds_total", value, part)
        rest = max(0.0, whole - drafting - verifying)
        for share, value in zip(SHARES, (drafting, verifying, rest), strict=True):
            self._add("spec_decode_seconds_total", value, share)

    def _show(self, last: StepMetrics) -> None:
        """The gauges, after the last step."""
        levels, estimates = self._levels, last.estimates
        levels["requests_running"] = last.num_running
        levels["requests_waiting"] = last.num_waiting
        usage = last.blocks_used / last.blocks_total if last.blocks_total else 0.0
        levels["kv_cache_usage_ratio"] = usage
        levels["spec_decode_main_proposer_speedup_ratio"] = estimates.speedup
        if estimates.mode != self._mode:
            self._mode = estimates.mode
            for mode in get_args(Mode):
                self._labelled["spec_decode_mode", mode].set(float(mode == self._mode))


def _build(metric: Metric, registry: CollectorRegistry) -> Collector:
    """All label values exist from the start, at zero, so that rates see the first event."""
    name, labels = f"foredraft_{metric.name}", tuple(metric.labels)
    if metric.name == "inter_token_latency_seconds":
        tally = Tally(name, metric.meaning, metric.buckets)
        registry.register(tally)
        return tally
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
