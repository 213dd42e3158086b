"""All metrics, declared here only; the table in docs/operations.md is generated from this."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Literal, get_args

from engine.config import MAX_K, PROPOSERS
from engine.messages import CONTEXTS, CheckOutcome, Mode, Reason, SwapOutcome
from server.engine.lifecycle import EngineState
from server.engine.open_requests import ResumeOutcome

Finish = Literal["stop", "length", "abort", "timeout", "refused", "error"]
Rejection = Literal[
    "invalid", "context_length", "unauthorized", "foreign_origin", "unknown_model", "too_large",
    "queue_full", "not_ready", "rate_limited",
]  # fmt: skip
PARTS = ("schedule", "propose", "verify", "accept", "commit", "emit", "around")  # of StepSeconds

LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
ITL_BUCKETS = (0.0001, 0.00025, 0.0005, *LATENCY[:-3])
DURATION = (*LATENCY[3:], 120.0, 300.0, 600.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)


@dataclass(frozen=True)
class Metric:
    """One metric. `name`: without the prefix. `labels`: at most one, with its values. `of`: the
    field of StepMetrics that it sums or shows; a list is summed by index."""

    type: Literal["counter", "gauge", "histogram"]
    name: str
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    of: str = ""

    @property
    def label(self) -> str | None:
        return next(iter(self.labels), None)

    @property
    def label_values(self) -> tuple[str, ...]:
        """The values of the label; one empty string if there is no label."""
        return next(iter(self.labels.values()), ("",))


counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")

_POSITIONS = {"position": tuple(str(i) for i in range(MAX_K))}

METRICS: tuple[Metric, ...] = (
    histogram(
        "time_to_first_token_seconds",
        "from the arrival of a request to its first token",
        buckets=LATENCY,
    ),
    histogram(
        "inter_token_latency_seconds",
        "time since the previous delivery divided by the tokens delivered, once per token",
        buckets=ITL_BUCKETS,
    ),
    histogram(
        "e2e_request_latency_seconds", "from the arrival of a request to its end", buckets=DURATION
    ),
    histogram(
        "request_queue_time_seconds",
        "from the arrival of a sequence to the first step that ran it; those that end in the queue"
        " are not in it",
        buckets=LATENCY,
    ),
    histogram(
        "request_prompt_tokens", "prompt tokens of an ended request, of all prompts", buckets=TOKENS
    ),
    histogram(
        "request_generation_tokens",
        "tokens of the replies of an ended request, of all choices",
        buckets=TOKENS,
    ),
    counter("prompt_tokens_total", "prompt tokens of ended requests, cached ones too"),
    counter(
        "generation_tokens_total",
        "tokens generated, by the engine's count",
        of="num_generated_tokens",
    ),
    counter(
        "requests_total",
        "ended requests by how they ended; `abort`: the client went away; `timeout`: at a deadline;"
        " `refused`: invalid, as found by the engine; `error`: by a fault of the server",
        {"reason": get_args(Finish)},
    ),
    counter(
        "rejected_requests_total",
        "requests that never reached the engine, by reason",
        {"reason": get_args(Rejection)},
    ),
    counter(
        "grammar_checks_total",
        "grammars of requests that were compiled ahead of the engine, by outcome: honoured,"
        " `refused`, `too_slow` (more CPU time than allowed) or `busy` (an overloaded machine)."
        " One that was compiled before is remembered and not counted",
        {"outcome": get_args(CheckOutcome)},
    ),
    histogram(
        "grammar_check_seconds",
        "time of each of those, the wait for its turn included",
        buckets=LATENCY,
    ),
    gauge("requests_running", "sequences in the batch", of="num_running"),
    gauge("requests_waiting", "sequences queued in the engine", of="num_waiting"),
    gauge("waiting_prompt_tokens", "prompt tokens of requests that wait for their first token"),
    gauge("kv_cache_usage_ratio", "blocks in use, of all blocks"),
    counter("prefix_cache_queried_tokens_total", "prompt tokens looked up", of="queried_tokens"),
    counter(
        "prefix_cache_hit_tokens_total",
        "of those, found and not computed again",
        of="cached_tokens",
    ),
    counter(
        "preemptions_total",
        "sequences put back into the queue because no KV blocks were free",
        of="preemptions",
    ),
    counter("steps_total", "engine steps"),
    counter("prefill_tokens_total", "prompt positions computed", of="num_prompt_tokens"),
    counter(
        "step_seconds_total",
        "seconds by part of a step; `around`: between one step and the next, where that follows at"
        " once; `forward` is the time in model forwards, contained in propose and verify",
        {"part": (*PARTS, "forward")},
    ),
    counter(
        "spec_decode_num_drafts_total",
        "sequences that sampled in a step, K = 0 included",
        of="num_sampling",
    ),
    counter(
        "spec_decode_num_draft_tokens_total",
        "draft tokens verified, by proposer",
        {"proposer": PROPOSERS},
    ),
    counter(
        "spec_decode_num_accepted_tokens_total",
        "draft tokens accepted, by proposer",
        {"proposer": PROPOSERS},
    ),
    counter(
        "spec_decode_num_draft_tokens_per_pos_total",
        "draft tokens verified at this position, 0 being the first; of a tree all nodes there",
        _POSITIONS,
        of="proposed_at",
    ),
    counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "draft tokens accepted at this position",
        _POSITIONS,
        of="accepted_at",
    ),
    counter(
        "spec_decode_num_draft_tokens_per_context_total",
        "draft tokens of the main proposer after up to so many tokens of context",
        {"context": tuple(CONTEXTS)},
        of="proposed_behind",
    ),
    counter(
        "spec_decode_num_accepted_tokens_per_context_total",
        "of those, accepted",
        {"context": tuple(CONTEXTS)},
        of="accepted_behind",
    ),
    counter(
        "spec_decode_chosen_k_total",
        "sequences in a step by their K: the draft tokens verified, after all bounds",
        {"k": tuple(str(k) for k in range(MAX_K + 1))},
        of="k_counts",
    ),
    counter(
        "spec_decode_num_wasted_tokens_total",
        "draft tokens rejected, by proposer",
        {"proposer": PROPOSERS},
    ),
    counter(
        "spec_decode_seconds_total",
        "seconds of steps in three disjoint parts: forwards of the draft, forwards of the target,"
        " and all else (`host`)",
        {"part": ("draft", "verify", "host")},
    ),
    counter(
        "spec_decode_decisions_total",
        "steps by why their K was chosen: it `pays`, `off` (K = 0 does), exploration (while K is 0"
        " `probe`: some sequences draft, `trial`: all do; else `baseline`: K = 0), or `fixed` by"
        " configuration or operator",
        {"reason": get_args(Reason)},
    ),
    counter(
        "spec_decode_draft_swaps_total",
        "draft models loaded to replace the running one, by outcome: `refused`, or on `trial`, and"
        " then `kept` or `taken_back`",
        {"outcome": get_args(SwapOutcome)},
    ),
    gauge("spec_decode_mode", "1 for the current mode, 0 for the others", {"mode": get_args(Mode)}),
    gauge(
        "spec_decode_estimated_speedup_ratio",
        "estimated time of the last 512 steps (decaying) without speculation, divided by the time"
        " they took; 1 if not estimated",
    ),
    gauge(
        "spec_decode_main_proposer_speedup_ratio",
        "estimated tokens/s at the chosen K divided by estimated tokens/s at K = 0, for the main"
        " proposer alone; 1 if not estimated",
    ),
    counter(
        "spec_decode_compared_seconds_total",
        "seconds of steps without prompts as measured (`taken`), and as estimated for the same"
        " tokens without speculation (`plain`): rate(plain) / rate(taken) is the speed-up over any"
        " time and all replicas. Each step is bounded by what draft tokens at no cost would gain,"
        " so on an overloaded machine it is too low",
        {"kind": ("taken", "plain")},
    ),
    gauge(
        "spec_decode_estimated_regret_ratio",
        "estimated time of the last 512 steps (decaying) at their chosen K, divided by that at the"
        " best single K, minus 1; for the main proposer. Negative: adaptive K beat every fixed K",
    ),
    gauge(
        "engine_state",
        "1 for the present state of the engine, 0 for the others",
        {"state": get_args(EngineState)},
    ),
    counter("engine_restarts_total", "restarts of the engine process"),
    counter(
        "held_requests_total",
        "sequences that were held when their engine was lost or replaced, or that came while there"
        " was none, by what became of them:"
        " `resumed`, `too_late` (`server.resume_seconds` were over) or `given_up` (they were alone"
        " with two engines in a row that were lost)",
        {"outcome": get_args(ResumeOutcome)},
    ),
    histogram(
        "resume_gap_seconds",
        "from the loss of an engine, as it was noticed, to the next output of each of those that"
        " were resumed",
        buckets=LATENCY,
    ),
    gauge("build_info", "always 1, for its label", {"version": (version("foredraft"),)}),
)

# vLLM's names, exported too with `server.router_names`.
ROUTER_NAMES = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
}


def markdown() -> str:
    """Return the table for docs/operations.md: one line per metric."""
    head = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows = [
        f"| `foredraft_{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)}"
        f" | {m.meaning} |"
        for m in METRICS
    ]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
