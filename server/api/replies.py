"""Replies: the members that every client may rely on (there may be more), and how usage, provenance
and log-probabilities (natural logarithms) are written.

A reply may have hundreds of thousands of log-probabilities. Those of more than MANY positions are
encoded row by row, so that not all exist as objects at once; if there are `many`, in a thread,
which lets the event loop run between rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from engine.messages import Mode, Reason, SwapOutcome, TokenLogprobs
from server.generation.annotations import TextLogprobs, TokenOrigin, token_text
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.usage import Usage
from server.text.tokenizer import Tokenizer

MANY = 256  # positions
FLOOR = -9999.0  # replaces minus infinity, which JSON does not have
encode = msgspec.json.Encoder().encode
CLOSED = ConfigDict(extra="forbid")

Count = Annotated[int, Field(ge=0)]
Object = dict[str, Any]


class ErrorBody(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    error: ErrorBody


class MessagesErrorBody(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    message: str
    type: str
    param: str | None
    code: str | None


class MessagesError(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str | None


class Proposed(TypedDict):
    proposed: Count
    accepted: Count


class SpeculationUsage(Proposed):
    enabled: bool
    max_draft: Count | Literal["auto"]
    proposers: list[str]
    rounds: Count
    by_proposer: dict[str, Proposed]


class PromptDetails(TypedDict):
    cached_tokens: Count


class CompletionDetails(TypedDict):
    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class UsageBody(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    speculation: SpeculationUsage


class ResponseUsage(TypedDict):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count
    speculation: SpeculationUsage


class OneToken(TypedDict):
    token: str
    logprob: float | None
    bytes: list[Count]


class ChosenToken(OneToken):
    top_logprobs: list[OneToken]


class ChatLogprobs(TypedDict):
    content: list[ChosenToken]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptToken(TypedDict):
    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class Choice(TypedDict):
    index: Count
    token_ids: NotRequired[list[Count]]
    provenance: NotRequired[list[TokenOrigin]]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: NotRequired[list[Count]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Head(TypedDict):
    id: str
    created: Count
    model: str
    system_fingerprint: str
    seed: int
    usage: UsageBody
    service_tier: NotRequired[Literal["default"]]


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Function(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class AssistantReply(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: AssistantReply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[Count]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    content: list[Object]


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Object]
    content: list[Object]


class OutputCall(TypedDict):
    type: Literal["function_call"]
    name: str
    arguments: str


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Count
    model: str
    status: Literal["completed", "incomplete"]
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage
    store: Literal[False]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class TurnUsage(TypedDict):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    speculation: SpeculationUsage


class TurnReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    system_fingerprint: str
    seed: int
    content: Annotated[list[Object], Field(min_length=1)]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: TurnUsage


class TokenCount(TypedDict):
    input_tokens: Count


class Tokens(TypedDict):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: NotRequired[list[str] | None]


class Text(TypedDict):
    prompt: str


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count | None


class Models(TypedDict):
    object: Literal["list"]
    data: Annotated[list[Model], Field(min_length=1)]


class Capabilities(TypedDict):
    object: Literal["capabilities"]
    limits: Object
    unknown_fields: Literal["refuse", "warn"]
    endpoints: Object


class Share(TypedDict):
    proposed: float | None
    accepted: float | None
    share: float | None


class Swapped(TypedDict):
    draft: str
    outcome: Literal["loading"] | SwapOutcome
    message: str


class Speculation(TypedDict):
    object: Literal["speculation"]
    mode: Mode
    controller: str
    proposer: str
    k_max: Count
    k: Count
    reason: Reason | None
    explanation: str
    num_sequences: Count
    speedup: float | None
    tokens_per_round: float | None
    by_proposer: dict[str, Share]
    acceptance: float | None
    kept: list[float | None]
    kept_by_context: dict[str, float | None]
    survival: list[float | None]
    tokens_per_second: list[float | None]
    expected_speedup: float | None
    regret: float | None
    draft: str | None
    swap: Swapped | None


class Health(TypedDict):
    status: Literal["ok", "failed"]
    engine: str


class Readiness(TypedDict):
    ready: bool
    engine: str


class Version(TypedDict):
    name: Literal["foredraft"]
    version: str


def usage_body(usage: Usage) -> UsageBody:
    """Return OpenAI's usage, and that of speculation: the draft tokens proposed and accepted, in
    total and by proposer; the number of sampling steps (rounds) for all completion tokens; the
    allowed proposers and the bound on draft tokens.
    Steps after the one that completed a stop string are not counted.

    Accepted prediction tokens are completion tokens that were drafted from the prediction; rejected
    ones were drafted from it but are not in the completion, nor in `completion_tokens`."""
    drafting = usage.drafting
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.predicted,
            "rejected_prediction_tokens": usage.mispredicted,
        },
        "speculation": {
            "enabled": drafting.enabled,
            "max_draft": drafting.max_draft,
            "proposers": list(drafting.proposers),
            "proposed": usage.proposed,
            "accepted": usage.accepted,
            "rounds": usage.rounds,
            "by_proposer": {
                name: {"proposed": proposed, "accepted": accepted}
                for name, (proposed, accepted) in usage.by_proposer.items()
            },
        },
    }


def many(deltas: Iterable[Delta]) -> bool:
    """Whether encoding these deltas would block the event loop for too long."""
    return any(delta.logprobs is not None and len(delta.logprobs) > MANY for delta in deltas)


def _listed(rows: Iterable[Any], count: int) -> Any:
    """Return the rows as a list, or as encoded JSON if there are more than MANY."""
    if count <= MANY:
        return list(rows)
    return msgspec.Raw(b"[%b]" % b",".join([encode(row) for row in rows]))


def completion_logprobs(entries: Sequence[TextLogprobs] | None) -> CompletionLogprobs | None:
    """Return tokens, token_logprobs, top_logprobs and text_offset; null for the first token of an
    echoed prompt. `top_logprobs` may have one entry more than requested: the chosen token."""
    if entries is None:
        return None
    count = len(entries)
    return {
        "tokens": _listed((entry.text(entry.token) for entry in entries), count),
        "token_logprobs": _listed((_value(entry.logprob) for entry in entries), count),
        "top_logprobs": _listed((_top(entry) for entry in entries), count),
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(
    entries: Sequence[TextLogprobs] | None, *, whole: bool = False
) -> ChatLogprobs | None:
    """Return `content` with one entry per token: text, bytes and alternatives. `whole`: no server
    code reads the entries, so they may be encoded JSON."""
    if entries is None:
        return None
    content = (
        {
            **_one_token(entry, entry.token, entry.logprob),
            "top_logprobs": [_one_token(entry, *other) for other in entry.top],
        }
        for entry in entries
    )
    return {"content": _listed(content, len(entries) if whole else 0), "refusal": None}


def prompt_logprobs(generation: Generation, number: int, count: int, tokenizer: Tokenizer) -> Any:
    """Return the log-probabilities of prompt `number` in vLLM's format: for each token an object
    that maps the ids of the token itself and of the `count` likeliest to log-probability, rank
    among all tokens and text; null for the first token."""

    def row(token: int, entry: TokenLogprobs | None) -> dict[str, PromptToken] | None:
        if entry is None:
            return None
        ranked = [(token, entry.logprob, entry.rank)]
        ranked += [(i, logprob, n) for n, (i, logprob) in enumerate(entry.top[:count], 1)]
        return {
            str(i): {
                "logprob": max(logprob, FLOOR),
                "rank": rank,
                "decoded_token": token_text(tokenizer.token_bytes(i)),
            }
            for i, logprob, rank in ranked
        }

    tokens, entries = generation.spec.prompts[number], generation.prompt_logprobs(number)
    return _listed(map(row, tokens, entries), len(tokens))


def _value(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, FLOOR)


def _top(entry: TextLogprobs) -> dict[str, float] | None:
    """Map token texts to log-probabilities; of two tokens with one text, the likelier counts."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
        top.setdefault(entry.text(token), max(logprob, FLOOR))
    return top


def _one_token(entry: TextLogprobs, token: int, logprob: float | None) -> OneToken:
    raw = entry.tokenizer.token_bytes(token)
    return {"token": token_text(raw), "logprob": _value(logprob), "bytes": list(raw)}
