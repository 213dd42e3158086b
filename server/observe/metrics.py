"""The Prometheus registry: one per instance. All metrics are declared in `metrics_table`.

Counters are kept here, in the front end, so they survive an engine restart. They are sums: rates
and ratios are left to PromQL. Label values come from fixed sets, so no request can add a series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from engine.messages import CheckOutcome, Mode, StepMetrics
from server.engine.lifecycle import EngineState
from server.engine.open_requests import ResumeOutcome
from server.observe.exchange import Ended
from server.observe.metrics_table import METRICS, PARTS, ROUTER_NAMES, Finish, Rejection
from server.observe.speculation import Gain, Regret, compared, seconds_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `render`
PREFIX = "foredraft_"
NO_LABELS: Mapping[str, str] = {}
# Precomputed (key, field of StepMetrics), since every step uses them.
_OF_STEPS = [metric for metric in METRICS if metric.of]
_SUMS = [((m.name, ""), m.of) for m in _OF_STEPS if m.type == "counter" and not m.label]
_GAUGES = [((m.name, ""), m.of) for m in _OF_STEPS if m.type == "gauge"]
_LISTS = [([(m.name, at) for at in m.label_values], m.of) for m in _OF_STEPS if m.label]
_MODES = get_args(Mode)


class Histogram:
    """Counts by bucket (upper bounds inclusive), and per bucket the last reply as an exemplar."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._named: dict[int, Exemplar] = {}

    def observe(self, value: float, count: int = 1, *, reply: str = "") -> None:
        """Add the same value `count` times. `reply`: id of the reply that it belongs to."""
        at = bisect_left(self._bounds, value)
        self._counts[at] += count
        self._sum += value * count
        if reply:
            self._named[at] = Exemplar({"reply": reply}, value)

    def family(
        self, name: str, meaning: str, labels: Mapping[str, str] = NO_LABELS
    ) -> HistogramMetricFamily:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        counts = enumerate(zip(names, accumulate(self._counts), strict=True))
        buckets = [
            (*bucket, self._named[i]) if i in self._named else bucket for i, bucket in counts
        ]
        family = HistogramMetricFamily(name, meaning, labels=[*labels])
        family.add_metric([*labels.values()], buckets, self._sum)
        return family


class Metrics(Collector):
    """All metrics of one server. Not thread-safe; everything runs in the event loop.

    Values are plain numbers, passed to prometheus_client only by `render`: the locks and checks of
    its own counters took as long as the rest of a step in the front end.

    `model_name`: a label of every series, if given. `engine`: returns the pid of the engine
    process, if there is one, to export its process metrics too. `router_names`: also export the
    names in ROUTER_NAMES.
    """

    def __init__(
        self,
        *,
        model_name: str = "",
        engine: Callable[[], int | None] = lambda: None,
        router_names: bool = False,
    ) -> None:
        self._labels = {"model_name": model_name} if model_name else NO_LABELS
        # By (name, label value or ""). All exist from the start, at zero, so that rates see the
        # first event.
        self._values: dict[tuple[str, str], float] = {
            (metric.name, value): 0.0 for metric in METRICS for value in metric.label_values
        }
        self._histograms = {m.name: Histogram(m.buckets) for m in METRICS if m.type == "histogram"}
        self._state: EngineState | None = None
        self._aliases = ROUTER_NAMES if router_names else {}
        self.regret, self.gain = Regret(), Gain()
        self._set("build_info", 1, version("foredraft"))
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        ProcessCollector(PREFIX + "engine", lambda: engine() or "none", registry=self._registry)

    def render(self, *, waiting_tokens: int = 0) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return self.rendered("", waiting_tokens=waiting_tokens)[0]

    def rendered(self, accept: str, *, waiting_tokens: int = 0) -> tuple[bytes, str]:
        """Return (body, content type) for a scraper's Accept header. OpenMetrics includes reply ids
        as exemplars of the buckets."""
        self._set("waiting_prompt_tokens", waiting_tokens)
        self._set("spec_decode_estimated_regret_ratio", self.regret.value)
        self._set("spec_decode_estimated_speedup_ratio", self.gain.speedup or 1.0)
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is not a number
            encode, kind = choose_encoder("")
        return encode(self._registry), kind

    def total(self, name: str) -> float:
        """Return the value of a gauge, or of a counter summed over its label."""
        return sum(value for (known, _), value in self._values.items() if known == name)

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            name = PREFIX + metric.name
            if metric.type == "histogram":
                yield self._histograms[metric.name].family(name, metric.meaning, self._labels)
                continue
            kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            names = [metric.label] if metric.label else []
            family = kind(name, metric.meaning, labels=[*names, *self._labels])
            for value in metric.label_values:
                values = [value] if metric.label else []
                count = self._values[metric.name, value]
                family.add_metric([*values, *self._labels.values()], count)
            yield family
        for alias, name in self._aliases.items():
            family = GaugeMetricFamily(
                alias, f"{PREFIX}{name}, for routers", labels=[*self._labels]
            )
            family.add_metric([*self._labels.values()], self._values[name, ""])
            yield family

    def observe_step(self, step: StepMetrics) -> None:
        """Add one step, or an idle heartbeat (whose sums are zero)."""
        values = self._values
        for key, field in _SUMS:
            values[key] += getattr(step, field)
        for key, field in _GAUGES:
            values[key] = getattr(step, field)
        for keys, field in _LISTS:
            for key, count in zip(keys, getattr(step, field), strict=False):
                values[key] += count
        for proposer, (proposed, accepted) in step.by_proposer.items():
            self._add("spec_decode_num_draft_tokens_total", proposed, proposer)
            self._add("spec_decode_num_accepted_tokens_total", accepted, proposer)
            self._add("spec_decode_num_wasted_tokens_total", proposed - accepted, proposer)
        usage = step.blocks_used / step.blocks_total if step.blocks_total else 0.0
        self._set("kv_cache_usage_ratio", usage)
        if step.num_sampling or step.num_prompt_tokens:
            self._count_seconds(step)
        if step.swap is not None:
            self._add("spec_decode_draft_swaps_total", 1, step.swap.outcome)
        estimates = step.estimates
        self.gain.observe(step)
        if step.num_sampling:
            self.regret.observe(estimates, step.num_generated_tokens)
            self._add("spec_decode_decisions_total", 1, estimates.reason)
        self._set("spec_decode_main_proposer_speedup_ratio", estimates.speedup)
        for mode in _MODES:
            self._set("spec_decode_mode", mode == estimates.mode, mode)

    def observe_tokens(self, count: int, *, gap_seconds: float) -> None:
        """Add ITLs: `count` tokens arrived together, `gap_seconds` after the previous delivery. Not
        to be called for the first delivery."""
        self._histograms["inter_token_latency_seconds"].observe(gap_seconds / count, count)

    def observe_queue(self, seconds: float) -> None:
        """Add the wait of a sequence for its first step."""
        self._histograms["request_queue_time_seconds"].observe(seconds)

    def observe_request(self, ended: Ended) -> None:
        """Add one ended request."""
        self._add("requests_total", 1, ended.finish)
        self._add("prompt_tokens_total", ended.prompt_tokens)
        if ended.first_token is not None:
            first = self._histograms["time_to_first_token_seconds"]
            first.observe(ended.first_token, reply=ended.id)
        self._histograms["e2e_request_latency_seconds"].observe(ended.total, reply=ended.id)
        self._histograms["request_prompt_tokens"].observe(ended.prompt_tokens)
        self._histograms["request_generation_tokens"].observe(ended.reply_tokens)

    def count_rejection(self, reason: Rejection) -> None:
        """Count a request that was refused before it reached the engine."""
        self._add("rejected_requests_total", 1, reason)

    def observe_grammar(self, outcome: CheckOutcome, seconds: float) -> None:
        """Add a grammar that was compiled ahead of its request, or that the compiler had no time
        for."""
        self._add("grammar_checks_total", 1, outcome)
        self._histograms["grammar_check_seconds"].observe(seconds)

    def observe_held(self, outcome: ResumeOutcome, seconds: float) -> None:
        """Add the outcome of a held sequence, `seconds` after its engine was lost."""
        self._add("held_requests_total", 1, outcome)
        if outcome == "resumed":
            self._histograms["resume_gap_seconds"].observe(seconds)

    def set_engine_state(self, state: EngineState) -> None:
        """Set the engine's state. A requested replacement does not count as a restart."""
        if self._state == "lost" and state == "starting":
            self._add("engine_restarts_total", 1)
        self._state = state
        for name in get_args(EngineState):
            self._set("engine_state", name == state, name)
        if state != "ready":
            for gauge in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
                self._set(gauge, 0)

    def pace(self) -> tuple[float, float, float]:
        """Return (tokens computed, requests ended, seconds of engine work) since the start."""
        values = self._values
        tokens = values["prefill_tokens_total", ""] + values["generation_tokens_total", ""]
        ended = sum(values["requests_total", reason] for reason in get_args(Finish))
        return tokens, ended, sum(values["step_seconds_total", part] for part in PARTS)

    def _add(self, name: str, amount: float, label: str = "") -> None:
        self._values[name, label] += amount

    def _set(self, name: str, value: float, label: str = "") -> None:
        self._values[name, label] = float(value)

    def _count_seconds(self, step: StepMetrics) -> None:
        seconds = step.seconds
        drafting, verifying = seconds.propose_forward, seconds.verify_forward
        self._add("steps_total", 1)
        for part in PARTS:
            self._add("step_seconds_total", getattr(seconds, part), part)
        self._add("step_seconds_total", drafting + verifying, "forward")
        self._add("spec_decode_seconds_total", drafting, "draft")
        self._add("spec_decode_seconds_total", verifying, "verify")
        host = max(0.0, seconds_of(seconds) - drafting - verifying)
        self._add("spec_decode_seconds_total", host, "host")
        taken, plain = compared(step)
        self._add("spec_decode_compared_seconds_total", taken, "taken")
        self._add("spec_decode_compared_seconds_total", plain, "plain")
