"""The metrics by name: the only place where one is declared; the table in docs/operations.md is its
rendering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from engine.messages import PROPOSERS, CheckOutcome, Mode, Reason
from server.engine.lifecycle import EngineState

Finish = Literal["stop", "length", "abort", "error"]
Rejection = Literal[
    "invalid", "context_length", "unauthorized", "unknown_model", "too_large", "queue_full",
    "not_ready",
]  # fmt: skip
PARTS = (
    "schedule",
    "propose",
    "verify",
    "accept",
    "commit",
    "emit",
    "around",
    "forward",
)  # the last overlaps
SHARES = ("draft", "verify", "host")
KINDS = ("taken", "plain")
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
    Metric(
        "grammar_checks_total",
        "counter",
        "grammars of requests that were compiled ahead of the engine, by what came of it: honoured"
        " or `refused`, or more CPU time than is allowed (`too_slow`), or no time for it (`busy`)."
        " One that was compiled before is remembered and not counted",
        {"outcome": get_args(CheckOutcome)},
    ),
    Metric(
        "grammar_check_seconds",
        "histogram",
        "time of each of those, the wait for its turn included",
        buckets=LATENCY,
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
        "seconds by part of a step; `around`: between one step and the next, where that follows at"
        " once; `forward` is the time in model forwards, contained in propose and verify",
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
        "of those, kept: tokens that needed no pass of the target for themselves",
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
        "rounds by their K: the guesses that were verified, after everything that bounds them",
        {"k": tuple(str(k) for k in range(MAX_DEPTH + 1))},
    ),
    Metric(
        "spec_decode_num_wasted_tokens_total",
        "counter",
        "tokens proposed, verified and not kept, by who guessed them",
        {"proposer": PROPOSERS},
    ),
    Metric(
        "spec_decode_seconds_total",
        "counter",
        "seconds of steps in three disjoint parts: forwards of the draft, forwards of the target,"
        " and all else (`host`)",
        {"part": SHARES},
    ),
    Metric(
        "spec_decode_decisions_total",
        "counter",
        "steps by why their K was chosen: it `pays`, `off` (0 does), an experiment (while K is 0"
        " `probe`: some guess, `trial`: all do; else `baseline`: K = 0, `neighbour`: a K one off),"
        " or `fixed` by somebody",
        {"reason": get_args(Reason)},
    ),
    Metric(
        "spec_decode_mode",
        "gauge",
        "1 for the present mode, 0 for the others",
        {"mode": get_args(Mode)},
    ),
    Metric(
        "spec_decode_estimated_speedup_ratio",
        "gauge",
        "what all guesses together gain: time that the tokens of the last 512 steps (fading) would"
        " have taken without any, as the controller expects it, by the time they took; 1 where it"
        " does not estimate",
    ),
    Metric(
        "spec_decode_main_proposer_speedup_ratio",
        "gauge",
        "tokens/s at the chosen K by tokens/s at K = 0, as the controller expects them of the main"
        " proposer alone; 1 where it does not estimate",
    ),
    Metric(
        "spec_decode_compared_seconds_total",
        "counter",
        "seconds of steps without prompts, as they were (`taken`), and that their tokens would have"
        " taken without guesses, as the controller expects (`plain`): the rate of this by the rate"
        " of those is the speed-up over any time and all replicas",
        {"kind": KINDS},
    ),
    Metric(
        "spec_decode_estimated_regret_ratio",
        "gauge",
        "time that the last 512 steps (fading) took as their K was chosen, by the time that the"
        " best single K would have taken, minus 1; both as the controller expects them of the main"
        " proposer. Below 0: choosing anew won",
    ),
    Metric(
        "engine_state",
        "gauge",
        "1 for the present state of the engine, 0 for the others",
        {"state": get_args(EngineState)},
    ),
    Metric("engine_restarts_total", "counter", "times the engine process was started again"),
)


def markdown() -> str:
    """The documents' table: one line per metric."""
    head = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows = [
        f"| `foredraft_{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)}"
        f" | {m.meaning} |"
        for m in METRICS
    ]
    return "\n".join([*head, *rows])
