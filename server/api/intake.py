"""Intake: from a request to a started Generation, the same for all endpoints that generate.

Order, so that the cheap refusals come first: body within its cap (413, `body`), JSON and fields
(400, `request`), model name (404), engine ready (503), what the engine has and has not (400), room
(429), tokenizing (`prompts`), context and log-probabilities (400), room for the tokens (429), the
grammar in a child process (400). Leaves response shapes to the endpoints.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from engine.messages import Ready, SamplingParams, Speculation, proposers_of
from server.api.auth import tenant_of
from server.api.errors import invalid, too_long, unsupported
from server.api.prompts import Prompts, check_ids, of_chat, of_completion, of_prediction
from server.api.request import wrong
from server.api.schema import ChatRequest, CommonRequest, CompletionRequest, SpeculationOptions
from server.api.services import Services
from server.api.tool_use import ToolUse
from server.engine.admission import Charge
from server.generation.generation import Generation
from server.generation.generation_spec import MASK, GenerationSpec, Guessing
from server.generation.progress import PROGRESS, ReplyProgress
from server.keys import Tenant

GREEDY_BELOW = 1e-4  # of temperatures
SEED_BITS = 53  # of a drawn seed, which survives clients whose numbers are doubles (JavaScript)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A started generation and what its reply says about it."""

    id: str
    created: int
    model: str  # as the client called it
    fingerprint: str
    seed: int  # as the client gave it, or as drawn; the same seed gives the same text
    include_usage: bool
    generation: Generation
    service_tier: str | None = None  # as asked for; there is one only
    use: ToolUse | None = None  # how to read tool calls in it

    def head(self, kind: str) -> dict[str, Any]:
        tier = {} if self.service_tier is None else {"service_tier": "default"}
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **tier,
        }


async def start(
    services: Services, http: Request, request: ChatRequest | CompletionRequest, *, prefix: str
) -> Call:
    """A started generation of every choice of every prompt. `prefix`: of its id."""
    tenant = tenant_of(http, services.keyring)
    ready = _check(services, request, tenant)
    with services.admission.reserve(request.num_sequences):
        if isinstance(request, ChatRequest):
            prompts = await of_chat(services, request, ready)
        else:
            prompts = await of_completion(services, request, ready)
        num_tokens = _check_prompts(services, prompts, request, ready)
        if (asked := request.constraint) is not None:
            await services.grammars.check(asked.grammar, param=asked.param)
        prompts.prediction = await of_prediction(services, request, ready)
        seed = request.seeded if request.seeded is not None else secrets.randbits(SEED_BITS)
        progress: ReplyProgress | None = http.scope.get("extensions", {}).get(PROGRESS)
        id = prefix + uuid.uuid4().hex  # not what a reply goes on under: who began it may be here
        generation = Generation(
            _spec(services, tenant, request, prompts, ready, id=id, seed=seed),
            client=services.client,
            tokenizer=services.tokenizer,
            metrics=services.metrics,
            charge=Charge(services.admission, tenant, num_tokens),
            progress=progress,
        )
        now = time.time()
        generation.start(arrival=now)
        created, fingerprint = int(now), services.fingerprint(ready)
        if progress is not None:
            id, created = progress.begin(id, created, seed=seed, fingerprint=fingerprint)
    return Call(
        id=id,
        created=created,
        model=request.model,
        fingerprint=fingerprint,
        seed=seed,
        include_usage=request.stream_options.include_usage,
        generation=generation,
        service_tier=request.service_tier,
        use=prompts.use,
    )


def _check(services: Services, request: CommonRequest, tenant: Tenant) -> Ready:
    """The engine's facts, once the request is known to fit them; its prompts aside."""
    services.check_model(request.model)
    ready = services.client.require_open()
    request.check_settings(services)
    if request.priority and not tenant.may_prioritise:
        raise unsupported("priority", "is not among what this key may ask for; it must be 0")
    check_ids(request.biases, ready=ready, param="logit_bias")
    check_ids(request.stop_token_ids, ready=ready, param="stop_token_ids")
    _speculation(request.speculation, ready)
    if (resume := request.resume) is not None:
        check_ids(resume.token_ids, ready=ready, param="resume.token_ids")
        here = services.fingerprint(ready)
        if resume.system_fingerprint not in (None, here):
            said = f"is of a reply that this server would not make to the byte; it is {here}"
            raise invalid("resume.system_fingerprint", said)
    count, allowed = request.num_sequences, services.admission.max_inflight
    if count > allowed:
        name = "n" if request.fan_out == request.n else "best_of"
        said = f": with all prompts {count} are asked for; this server admits at most {allowed}"
        raise invalid(name, said)
    return ready


def _check_prompts(
    services: Services, prompts: Prompts, request: CommonRequest, ready: Ready
) -> int:
    """Their tokens, and those to resume from, once it is known that they fit the model, the reply
    and the queue."""
    for ids, param in zip(prompts.ids, prompts.params, strict=True):
        _check_length(len(ids), request, ready, param=param)
    num_tokens = sum(map(len, prompts.ids))
    _check_logprobs(num_tokens, request, most=services.config.server.max_logprobs)
    num_tokens += len(request.resume.token_ids) if request.resume is not None else 0
    services.admission.check_tokens(num_tokens)
    return num_tokens


def _check_length(size: int, request: CommonRequest, ready: Ready, *, param: str) -> None:
    """Only a `max_tokens` that the client named is held against it; a default is clipped. The words
    are OpenAI's: litellm and langchain know a full context by them. `param`: the field to name."""
    context = ready.max_model_len
    known = f"This model's maximum context length is {context} tokens, prompt and output together"
    if size == 0:
        raise invalid(param, "is empty; a prompt needs at least one token")
    if size > context or (size == context and request.length != 0):
        raise too_long(param, f"{known}; the prompt is too long: it alone has {size}")
    named = {"max_tokens", "max_completion_tokens"} & request.model_fields_set
    if named and request.length is not None and size + request.length > context:
        raise too_long(
            min(named) if request.length >= context else param,
            f"{known}, but {size + request.length} were asked for: {size} in the prompt and"
            f" {request.length} of `{min(named)}`",
        )


def _logprobs(num_tokens: int, request: CommonRequest) -> tuple[int, int]:
    """How many a reply has of its prompts, alternatives included, and of one token of each of its
    sequences."""
    per_token = 0 if request.prompt_logprobs is None else request.prompt_logprobs + 1
    each = 0 if request.alternatives is None else request.alternatives + 1
    echoed = num_tokens * request.fan_out if request.echoes else 0
    return num_tokens * per_token + echoed * each, each * request.num_sequences


def _check_logprobs(num_tokens: int, request: CommonRequest, *, most: int) -> None:
    """What is certain to be in the reply, and a length that the client named."""
    count, each = _logprobs(num_tokens, request)
    count += each * max(request.min_tokens, request.length or 0 if request.names_length else 0)
    if count > most:
        name = "prompt_logprobs" if request.prompt_logprobs is not None else request.LOGPROBS
        said = f"asks for up to {count} log-probabilities in one reply, alternatives included;"
        raise invalid(name, f"{said} at most {most} are given (`server.max_logprobs`)")


def _most_tokens(num_tokens: int, request: CommonRequest, ready: Ready, *, most: int) -> int:
    """Of one reply. Where nobody said how many, no more than it may have log-probabilities of."""
    tokens = request.length if request.length is not None else ready.max_model_len
    count, each = _logprobs(num_tokens, request)
    if each and not request.names_length:
        tokens = min(tokens, max((most - count) // each, 1))
    return tokens


def _speculation(asked: SpeculationOptions | None, ready: Ready) -> Speculation | None:
    """The options as the engine takes them. Raises ApiError for what this engine has not."""
    if asked is None:
        return None
    bound = None if asked.max_draft == "auto" else asked.max_draft
    if bound is not None and bound > ready.k_max:
        allowed = f'"auto" or an integer from 0 to {ready.k_max}'
        raise wrong("speculation.max_draft", allowed, bound)
    for i, name in enumerate(asked.proposers or ()):
        if name not in ready.proposers:
            here = ", ".join(ready.proposers) or "nobody: speculation is off"
            said = f": {name} does not guess on this server; {here}"
            raise invalid(f"speculation.proposers[{i}]", said)
    proposers = None if asked.proposers is None else tuple(asked.proposers)
    return Speculation(max_draft=bound if asked.enabled else 0, proposers=proposers)


def _spec(
    services: Services,
    tenant: Tenant,
    request: CommonRequest,
    prompts: Prompts,
    ready: Ready,
    *,
    id: str,
    seed: int,
) -> GenerationSpec:
    num_tokens, most = sum(map(len, prompts.ids)), services.config.server.max_logprobs
    max_tokens = _most_tokens(num_tokens, request, ready, most=most)
    params = _sampling_params(
        request, prompts, ready, max_tokens=max_tokens, seed=seed, salt=tenant.salt
    )
    bounds = (services.config.server.request_timeout_seconds, request.timeout)
    guessing, proposers = Guessing(), proposers_of(params, ready)
    if proposers:
        bound = None if params.speculation is None else params.speculation.max_draft
        guessing = Guessing(True, "auto" if bound is None else bound, proposers)
    grammar_param = request.constraint.param if request.constraint is not None else None
    return GenerationSpec(
        id=id,
        prompts=prompts.ids,
        params=params,
        guessing=guessing,
        context=ready.max_model_len,
        n=request.n,
        best_of=request.fan_out,
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        shown_tokens=frozenset() if prompts.use is None else prompts.use.format.shown_tokens,
        echoes=prompts.echoes,
        show_logprobs=request.alternatives is not None,
        show_tokens=request.return_token_ids,
        begun=request.resume.token_ids if request.resume is not None else None,
        grammar_param=grammar_param if prompts.grammar is None else "tools",
        tenant=tenant.name,
        weight=tenant.row.weight,
        seconds=min((bound for bound in bounds if bound is not None), default=None),
    )


def _sampling_params(
    request: CommonRequest,
    prompts: Prompts,
    ready: Ready,
    *,
    max_tokens: int,
    seed: int,
    salt: Callable[[str], str],
) -> SamplingParams:
    """A field that both have under one name is handed on, unless it is changed here."""
    counts = [request.alternatives if prompts.echoes else None, request.prompt_logprobs]
    logprobs = request.alternatives
    if logprobs is None and request.fan_out > request.n:
        logprobs = 0  # to choose by
    changed: dict[str, Any] = {
        "seed": seed & MASK,
        "max_tokens": max_tokens,
        "temperature": request.temperature if request.temperature >= GREEDY_BELOW else 0.0,
        "top_k": request.top_k if 0 < request.top_k < ready.vocab_size else 0,
        "stop_token_ids": (*request.stop_token_ids, *(() if request.ignore_eos else prompts.ends)),
        "logit_bias": request.biases,
        "logprobs": logprobs,
        "prompt_logprobs": max((count for count in counts if count is not None), default=None),
        "prediction": prompts.prediction,
        "speculation": _speculation(request.speculation, ready),
        "grammar": prompts.grammar or request.grammar,
        "cache_salt": salt(request.cache_salt),
    }
    same = CommonRequest.model_fields.keys() & set(SamplingParams.__struct_fields__)
    return SamplingParams(**{name: getattr(request, name) for name in same} | changed)
