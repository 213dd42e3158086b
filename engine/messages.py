"""The messages between the two processes: commands of the front end, events of the engine.

Imported by both sides, so it imports neither torch nor HTTP. msgspec tagged unions: a message that
does not decode is a programming error and raises; decoding executes no code. Token ids only: stop
strings, `n`, streaming and echo concern text or HTTP and are handled in the front end.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20

TARGET = "target"  # in `Output.sources`: the target's own token, not an accepted draft token

Mode = Literal["auto", "fixed", "off"]
Reason = Literal["pays", "off", "probe", "trial", "baseline", "fixed"]

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


# Result of compiling a grammar ahead of its request. `too_slow`: it took more CPU time than is
# allowed; `busy`: the compiler had no time, which says nothing about the grammar.
CheckOutcome = Literal["accepted", "refused", "too_slow", "busy"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on the generated text, from the first generated token to the last.

    `source` by kind: json_object: "" (any JSON object); json_schema: the schema as JSON text;
    regex: the pattern, which the whole text must match (Rust's syntax, no look-around, no
    back-references); choice: a JSON list of strings; lark: llguidance's dialect of Lark, in which
    `<|name|>` is a special token and `%json {...}` a schema, or llama.cpp's EBNF. The front end has
    compiled it within a deadline before sending it, so the engine's compilation is bounded too.

    `lead`: Lark, written by the server, for the whole output when other text (reasoning) precedes
    the constrained text, to which it refers as `@reply`; empty: nothing precedes it.
    """

    kind: GrammarKind
    source: str = ""
    lead: str = ""


class Speculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's settings for speculation; they never change its text."""

    max_draft: int | None = None  # maximum draft tokens per step; None: the engine chooses
    proposers: tuple[str, ...] | None = None  # in the order they are asked; None: the default


class Range(NamedTuple):
    """The values that the engine allows for a number, both included. The API may allow fewer."""

    least: float
    most: float


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is sampled. The front end and the engine both check the ranges.

    `seed` is always set: the front end draws one when the client gave none, and returns it, since
    the token at a position depends only on (target's distribution, seed, position).
    """

    seed: Annotated[int, Range(0, 2**64 - 1)]
    max_tokens: Annotated[int, Range(0, 2**31 - 1)]  # 0: only the prompt is computed
    temperature: Annotated[float, Range(0, 1000)] = 1.0  # 0 means argmax, ties to the lowest id
    top_p: Annotated[float, Range(0, 1)] = 1.0  # above 0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0  # 0 means off
    min_p: Annotated[float, Range(0, 1)] = 0.0
    min_tokens: int = 0  # <= max_tokens; EOS and stop_token_ids are impossible before that many
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0  # over generated tokens, like OpenAI's
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0  # over generated tokens
    repetition_penalty: Annotated[float, Range(1e-3, 1e3)] = 1.0  # prompt too (arXiv:1909.05858)
    logit_bias: dict[int, float] = {}  # from -100 to 100
    logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = None  # alternatives; None: not at all
    prompt_logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = None  # of prompt tokens (echo)
    cache_salt: str = ""
    priority: Annotated[int, Range(-(2**31), 2**31 - 1)] = 0  # lower first; no effect on the text
    grammar: Grammar | None = None  # constrains every generated token
    prediction: tuple[int, ...] = ()  # what the caller expects the output to be
    speculation: Speculation | None = None
    provenance: bool = False  # fill in `Output.sources`


# By field; a bound that depends on other fields is in `engine.scheduling.validation`.
RANGES: Mapping[str, Range] = {
    name: part
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for part in getattr(hint, "__metadata__", ())
}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: log_softmax of the raw logits, before penalties, bias,
    temperature and filters, so they do not depend on sampling fields."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # most likely first; ties to the lower id
    rank: int = 1  # of `token` among all, 1 is the most likely


class ResumedReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a request that is resumed, because an engine was lost or another replica began
    the reply. `tokens` count as generated (max_tokens, positions, penalties, grammar) but are
    neither sent again nor scored. The counters are those of Output."""

    tokens: list[int] = []
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    predicted: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Start one sequence. `id` is unique for the life of the front end."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float  # time.time() in the front end
    begun: ResumedReply = ResumedReply()
    tenant: str = ""  # competing tenants get tokens in proportion to their weights
    weight: float = 1.0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these sequences now; each still running gets one Output with finish `abort`."""

    ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish the running requests, accept no new ones, then exit with code 0."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Exit with code 0 after the current step."""


class SetSpeculation(msgspec.Struct, frozen=True, tag=True):
    """From the next step on, the configured controller chooses K (`auto`), K is `k` in every step
    (`fixed`; free proposers also propose up to `k`), or K is 0 (`off`). `k` is for `fixed` only. No
    request's text changes."""

    mode: Mode
    k: int = 0


class SwapDraft(msgspec.Struct, frozen=True, tag=True):
    """Load the draft model `draft`, a folder or a hub name, beside the running one, check it, and
    replace the running one between two steps. No request's text changes. StepMetrics.swap reports
    the outcome: `refused`, or `trial` and later `kept` or `taken_back`."""

    draft: str


Command = Submit | Abort | Drain | Stop | SetSpeculation | SwapDraft

SwapOutcome = Literal["refused", "trial", "kept", "taken_back"]


class Swap(msgspec.Struct, frozen=True):
    """The outcome of a SwapDraft and a sentence about it. `running`: the draft model now in use."""

    draft: str
    outcome: SwapOutcome
    message: str
    running: str


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one step for one sequence. Exactly one Output per sequence has a `finish`."""

    id: str
    tokens: list[int] = []  # committed in this step: one to K+1 of them, stop token included
    logprobs: list[TokenLogprobs] | None = None  # one per entry of `tokens` when asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole prompt, first Output only
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, when finish is `stop`
    error: str | None = None  # a sentence, when finish is `error`
    bad_request: bool = False  # the request caused the error, for example by its grammar
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; first Output only
    queued: float | None = None  # seconds from arrival to its first step; first Output only
    rounds: int = 0  # sampling steps of this sequence so far
    proposed: int = 0  # its draft tokens verified so far
    accepted: int = 0  # of those, accepted
    predicted: int = 0  # of the proposed ones, taken from `params.prediction`
    source: str = ""  # the proposer of this step's proposal
    forced: int = 0  # grammar tokens in that proposal; with `sources`
    sources: list[tuple[str, int]] | None = None  # runs in `tokens`: (proposer or TARGET, count)


class StepSeconds(msgspec.Struct, array_like=True):
    """Wall seconds of the phases of one step. `propose_forward` and `verify_forward` are the parts
    of propose and verify inside model forwards; the rest of the step is host overhead. `around`:
    time since the previous step, if this one followed directly (metrics, controller, sending)."""

    schedule: float = 0.0
    propose: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    emit: float = 0.0
    propose_forward: float = 0.0
    verify_forward: float = 0.0
    around: float = 0.0


class Estimates(msgspec.Struct, kw_only=True):
    """The controller's estimates at its last choice of K, and the choice. A controller that does
    not estimate leaves `survival` and `rates` empty.

    Reasons. `pays`: this K has the most expected tokens per second; `off`: K = 0 has the most.
    Exploration at K = 0: `probe` asks some sequences for a proposal, `trial` asks all for several
    steps; at K > 0: `baseline` runs K = 0. `fixed`: the configuration or the operator fixed K.
    """

    mode: Mode = "auto"
    k: int = 0
    reason: Reason = "off"
    acceptance: float = 0.0  # of a draft token after accepted ones, pooled over depths
    survival: list[float] = []  # [d-1]: chance that d draft tokens in a row are accepted
    rates: list[float] = []  # [k]: expected tokens/s of the whole batch at K = k; [0] is plain
    speedup: float = 1.0  # rates[k] / rates[0]
    num_sequences: int = 0  # batch size at that choice; 0: no choice yet


# Acceptance is counted by context length before the draft tokens: label and upper bound.
CONTEXTS: Mapping[str, float] = {"1k": 1 << 10, "4k": 1 << 12, "16k": 1 << 14, "longer": inf}


class StepMetrics(msgspec.Struct, kw_only=True):
    """Sums over one step; the front end adds them to counters and histograms."""

    step: int = 0
    seconds: StepSeconds = msgspec.field(default_factory=StepSeconds)
    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0  # prompt positions computed
    num_generated_tokens: int = 0
    plain_seconds: float = 0.0  # estimate without speculation; 0: unknown, or prompts were computed
    num_sampling: int = 0  # sequences that sampled in this step
    num_proposed: int = 0
    num_accepted: int = 0
    proposed_at: list[int] = []  # [depth-1]: draft tokens verified at this depth
    accepted_at: list[int] = []  # [depth-1]: of those, accepted
    by_proposer: dict[str, tuple[int, int]] = {}  # (proposed, accepted) by proposer
    proposed_behind: list[int] = []  # main proposer only, by context length (CONTEXTS)
    accepted_behind: list[int] = []
    k_counts: list[int] = []  # [k]: sampling sequences with k draft tokens verified
    blocks_used: int = 0
    blocks_total: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queried_tokens: int = 0  # prompt tokens looked up in it
    preemptions: int = 0
    estimates: Estimates = msgspec.field(default_factory=Estimates)
    swap: Swap | None = None  # outcome of a SwapDraft; sent once


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Progress of the engine's start; `total` is 0 if it is not known."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Facts known once the engine has started. Sent once, before all events but `Starting`."""

    pid: int
    target: str
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    attention: str
    proposer: str
    controller: str
    k_max: int
    exact: bool = False  # outputs do not depend on what else is in the batch
    proposers: tuple[str, ...] = ()  # allowed names in `speculation.proposers`
    memory: dict[str, int] = {}  # bytes by the parts of the plan, and their `limit`
    default_proposers: tuple[str, ...] = ()  # when a request names none
    draft: str = ""  # path of the draft model, if there is one
    measured: bytes = b""  # step costs (an encoded Profile), for the next engine


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The results of one step. While idle, sent once a second without items: the heartbeat."""

    items: list[Output]
    metrics: StepMetrics


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot continue and exits; `message` is one sentence for the log."""

    message: str
    permanent: bool = False  # it could not be built from this configuration


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The engine drains because of a SIGTERM, not a Drain from the front end, and refuses a request
    that arrived afterwards."""


Event = Starting | Ready | Outputs | Fatal | Draining


def proposers_of(params: SamplingParams, ready: Ready) -> tuple[str, ...]:
    """Return the proposers that a request may use, in its order, without
    those that lack input (a prediction, a grammar); empty if it must not speculate. Both processes
    interpret `params.speculation` with this function only."""
    settings = params.speculation
    if ready.k_max == 0 or (settings is not None and settings.max_draft == 0):
        return ()
    names = ready.default_proposers
    if settings is not None and settings.proposers is not None:
        names = settings.proposers
    lacks_input = {"prediction": not params.prediction, "grammar": params.grammar is None}
    return tuple(name for name in names if not lacks_input.get(name))


def mode_refusal(command: SetSpeculation, k_max: int) -> tuple[str, str] | None:
    """Return why an engine with this bound on K cannot apply the command: the field and a sentence;
    None if it can. Used by both processes."""
    if command.mode != "fixed":
        sentence = f"`k` is for the mode `fixed`, not for `{command.mode}`"
        return ("k", sentence) if command.k else None
    if k_max == 0:
        return "mode", "`mode` cannot be `fixed`: speculation is off in the configuration (K is 0)"
    if not 1 <= command.k <= k_max:
        sentence = f"`k` is {command.k}; it must be from 1 to {k_max}"
        return "k", f"{sentence}; for no speculation use the mode `off`"
    return None
