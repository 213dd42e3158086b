"""The wire between the two processes: what the front end may say, and what the engine answers.

Owned by both sides, so it imports neither torch nor HTTP. msgspec tagged unions: a message that
does not decode is a programming error and fails loudly; nothing here executes what it reads.
Token ids only: stop strings, `n`, streaming and echo are text or HTTP and never cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20

TARGET = "target"  # in `Output.sources`: the target drew the token itself, nobody had guessed it

Mode = Literal["auto", "fixed", "off"]
Reason = Literal["pays", "off", "probe", "trial", "baseline", "fixed"]

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


# What became of compiling a grammar ahead of its request. `too_slow`: it took more CPU time than is
# allowed; `busy`: there was no time for it, which says nothing about it.
CheckOutcome = Literal["accepted", "refused", "too_slow", "busy"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the generated text must be a sentence of, from the first generated token to the last.

    `source` by kind: json_object: "" (any JSON object); json_schema: the schema as JSON text;
    regex: the pattern, which the whole text must match (Rust's syntax, no look-around, no
    back-references); choice: a JSON list of strings; lark: llguidance's dialect of Lark, in which
    `<|name|>` is a special token and `%json {...}` a schema, or llama.cpp's EBNF. The front end has
    compiled it within a deadline before it is ever sent, so compiling it again is bounded.

    `lead`: Lark, of the server's own making, of the text that comes before that sentence, which is
    `@reply` in it (thinking, up to its end); empty: there is none.
    """

    kind: GrammarKind
    source: str = ""
    lead: str = ""


class Speculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request says about guesses for itself; the text is the same whatever it says."""

    max_draft: int | None = None  # at most so many guesses in a step; None: the engine chooses
    proposers: tuple[str, ...] | None = None  # who may guess, in that order; None: the default


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is sampled. Ranges are checked by the front end and by the engine.

    `seed` is always set: the front end draws one when the client gave none and returns it, since
    the token at a position is a function of (target's distribution, seed, position) alone.
    """

    seed: int  # 0 .. 2**64-1
    max_tokens: int  # 0: nothing is generated, only the prompt is computed
    temperature: float = 1.0  # 0 means argmax, ties to the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0 means off
    min_p: float = 0.0
    min_tokens: int = 0  # EOS and stop_token_ids are impossible before that many tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # over generated tokens, as OpenAI defines it
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens (CTRL, arXiv:1909.05858)
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # alternatives per generated token; None: no logprobs at all
    prompt_logprobs: int | None = None  # the same for prompt tokens (echo)
    cache_salt: str = ""
    priority: int = 0  # lower is served earlier and gives way later; the text does not depend on it
    grammar: Grammar | None = None  # every token keeps the text a prefix of one of its sentences
    prediction: tuple[int, ...] = ()  # what the caller expects the output to be
    speculation: Speculation | None = None
    provenance: bool = False  # say of each token who guessed it


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one position under the model itself: log_softmax of the raw logits,
    before penalties, bias, temperature and filters (so they do not depend on sampling fields)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # most likely first; ties to the lower id
    rank: int = 1  # of `token` among all, 1 is the most likely


class Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request had come to where it is gone on with: an engine was lost, or another replica
    began the reply. `tokens` count as generated wherever that matters (max_tokens, positions,
    penalties, grammar); they are neither sent again nor scored. The rest as in Output."""

    tokens: list[int] = []
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    predicted: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Run one sequence. `id` is unique for the life of the front end."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float  # time.time() in the front end
    begun: Begun = Begun()
    tenant: str = ""  # whose it is; where tenants compete, each gets tokens by its weight
    weight: float = 1.0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these sequences now; each still running gets one Output with finish `abort`."""

    ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs, take nothing new, then exit with code 0."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Exit with code 0 after the present step."""


class SetSpeculation(msgspec.Struct, frozen=True, tag=True):
    """From the next step on, K is chosen by the configured controller (`auto`), is `k` in every
    round (`fixed`; free guesses get up to `k`), or 0 for everybody (`off`). `k` is for `fixed`
    alone. The text of no request depends on it."""

    mode: Mode
    k: int = 0


class SwapDraft(msgspec.Struct, frozen=True, tag=True):
    """Load the draft model `draft`, a folder or a hub name, beside the one that runs, prove it, and
    put it in that one's place between two steps. The text of no request depends on it. StepMetrics
    tell what came of it: it is `refused`, or on `trial`, and then `kept` or `taken_back`."""

    draft: str


Command = Submit | Abort | Drain | Stop | SetSpeculation | SwapDraft

SwapOutcome = Literal["refused", "trial", "kept", "taken_back"]


class Swap(msgspec.Struct, frozen=True):
    """What became of the draft model that was named in a SwapDraft, with a sentence. `running`: the
    one that guesses from now on."""

    draft: str
    outcome: SwapOutcome
    message: str
    running: str


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did for one sequence. Exactly one Output per sequence has a `finish`."""

    id: str
    tokens: list[int] = []  # committed in this step: one to K+1 of them, stop token included
    logprobs: list[TokenLogprobs] | None = None  # one per entry of `tokens` when asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole prompt, first Output only
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, when finish is `stop`
    error: str | None = None  # a sentence, when finish is `error`
    bad_request: bool = False  # the error is of the request's own making, such as its grammar
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; first Output only
    queued: float | None = None  # seconds from arrival to its first step; first Output only
    rounds: int = 0  # sampling steps of this sequence so far
    proposed: int = 0  # draft tokens verified for it so far
    accepted: int = 0  # of those, kept
    predicted: int = 0  # of the proposed ones, taken from `params.prediction`
    source: str = ""  # who guessed in this step
    forced: int = 0  # of these guesses, those of the grammar, in another's chain; with `sources`
    sources: list[tuple[str, int]] | None = None  # who guessed `tokens`, in runs; see `TARGET`


class StepSeconds(msgspec.Struct, array_like=True):
    """Wall seconds of the parts of one step. `propose_forward` and `verify_forward` are the parts
    of propose and verify spent inside model forwards; the rest of the step is host overhead.
    `around`: since the step before, if this one followed at once: sums, the controller, sending."""

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
    """What the controller believed when it last chose, and what it chose. A controller that does
    not estimate leaves `survival` and `rates` empty.

    Reasons. `pays`: this K promises the most tokens per second; `off`: K = 0 does. Experiments:
    while K is 0 `probe` asks some sequences for a guess and `trial` all for several; while guesses
    pay `baseline` plays K = 0. `fixed`: the configuration or the operator fixed K.
    """

    mode: Mode = "auto"
    k: int = 0
    reason: Reason = "off"
    acceptance: float = 0.0  # chance that a guess which the target reaches is kept, all depths
    survival: list[float] = []  # [d-1]: chance that d guesses in a row are kept
    rates: list[float] = []  # [k]: expected tokens/s of the whole batch at K = k; [0] is plain
    speedup: float = 1.0  # rates[k] / rates[0]
    num_sequences: int = 0  # that the choice was made for; 0: none was made yet


# Acceptance is counted by tokens of context before the guesses: the label and the upper bound.
CONTEXTS: Mapping[str, float] = {"1k": 1 << 10, "4k": 1 << 12, "16k": 1 << 14, "longer": inf}


class StepMetrics(msgspec.Struct, kw_only=True):
    """Sums over one step; the front end makes counters and histograms, PromQL makes rates."""

    step: int = 0
    seconds: StepSeconds = msgspec.field(default_factory=StepSeconds)
    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0  # prompt positions computed
    num_generated_tokens: int = 0
    plain_seconds: float = 0.0  # that these take without guesses; 0: unknown, or prompts were run
    num_sampling: int = 0  # sequences that sampled in this step
    num_proposed: int = 0
    num_accepted: int = 0
    proposed_at: list[int] = []  # [depth-1]: proposals that reached this depth
    accepted_at: list[int] = []  # [depth-1]: of those, accepted
    by_proposer: dict[str, tuple[int, int]] = {}  # (proposed, accepted) by who guessed
    proposed_behind: list[int] = []  # of the main proposer, by CONTEXTS
    accepted_behind: list[int] = []
    k_counts: list[int] = []  # [k]: sampling sequences of which k guesses were verified
    blocks_used: int = 0
    blocks_total: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queried_tokens: int = 0  # prompt tokens looked up in it
    preemptions: int = 0
    estimates: Estimates = msgspec.field(default_factory=Estimates)
    swap: Swap | None = None  # what became of a SwapDraft by now; told once


class Starting(msgspec.Struct, frozen=True, tag=True):
    """How far the start has come; `total` is 0 where it is not known."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Facts discovered at start. Sent once, before all but `Starting`."""

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
    exact: bool = False  # a text does not depend on what else is computed
    proposers: tuple[str, ...] = ()  # whom a request may name in `speculation.proposers`
    memory: dict[str, int] = {}  # bytes by the parts of the plan, and their `limit`
    default_proposers: tuple[str, ...] = ()  # asked in this order when it names nobody
    draft: str = ""  # path of the draft model, if there is one
    measured: bytes = b""  # what steps cost, for the next engine of this configuration


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """One step's results, or (empty, once a second while idle) the heartbeat with the gauges."""

    items: list[Output]
    metrics: StepMetrics


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on and exits; `message` is one sentence for the log."""

    message: str
    useless_to_retry: bool = False  # it could not be made from this configuration


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The engine was told to end, by somebody else than the front end, and does not take a request
    that it got since."""


Event = Starting | Ready | Outputs | Fatal | Leaving


def proposers_of(params: SamplingParams, ready: Ready) -> tuple[str, ...]:
    """Who may guess for a request, in the order in which they are asked, without those that have
    nothing to go by; nobody when it wants no guesses. The one reading of `params.speculation`, for
    both processes."""
    said = params.speculation
    if ready.k_max == 0 or (said is not None and said.max_draft == 0):
        return ()
    named = ready.default_proposers
    if said is not None and said.proposers is not None:
        named = said.proposers
    idle = {"prediction": not params.prediction, "grammar": params.grammar is None}
    return tuple(name for name in named if not idle.get(name))


def mode_refusal(said: SetSpeculation, k_max: int) -> tuple[str, str] | None:
    """Why an engine with this bound on K cannot obey: the field, and a sentence. For both
    processes."""
    if said.mode != "fixed":
        word = f"`k` is for the mode `fixed`, not for `{said.mode}`"
        return ("k", word) if said.k else None
    if k_max == 0:
        return "mode", "`mode` cannot be `fixed`: the configuration has no guesses (K is 0)"
    if not 1 <= said.k <= k_max:
        word = f"`k` is {said.k}; it must be from 1 to {k_max}, and no guesses are the mode `off`"
        return "k", word
    return None
