"""Intake: from a request to a started Generation, the same for all endpoints that generate.

Cheap refusals come first: body size (413, `body`), JSON and fields (400, `request`), model name
(404), engine ready (503), what the engine supports (400), room for the sequences (429), tokenizing
(`prompts`), context and log-probabilities (400), room for the tokens (429), the grammar in a child
process (400). Response formats are left to the endpoints.
"""

from __future__ import annotations

import secrets
import time
import uuid
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request

from engine.messages import Ready, SamplingParams, Speculation, proposers_of
from server.api.errors import invalid, too_long, unsupported
from server.api.prompts import Prompts, check_ids, of_chat, of_completion, of_prediction
from server.api.request import RequestBody, wrong
from server.api.schema import ChatRequest, CommonRequest, CompletionRequest, SpeculationOptions
from server.api.services import Services
from server.api.tool_use import Reading
from server.engine.admission import Charge
from server.generation.generation import Generation
from server.generation.generation_spec import MASK, Drafting, GenerationSpec
from server.generation.progress import PROGRESS, ReplyProgress
from server.keys import Tenant
from server.observe.exchange import EXCHANGE
from server.text.markers import shown_tokens

GREEDY_BELOW = 1e-4  # lower temperatures are greedy
SEED_BITS = 53  # of drawn seeds: exact also in clients whose numbers are doubles (JavaScript)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A started generation and the metadata of its reply."""

    request: CommonRequest
    id: str
    created: int
    fingerprint: str
    seed: int  # from the request, or drawn; the same seed gives the same text
    generation: Generation
    use: Reading | None = None  # how to parse the reply, unless all of it is content


async def start(
    services: Services, http: Request, request: ChatRequest | CompletionRequest, *, prefix: str
) -> Call:
    """Start a generation of every choice of every prompt. `prefix`: of the reply's id."""
    tenant: Tenant = getattr(http.state, "tenant", services.keyring.anyone)  # set by `auth`
    exchange = EXCHANGE.get()
    if exchange is not None and exchange.id != http.headers.get("x-request-id"):
        exchange.id = request.request_id or exchange.id  # in place of one that was drawn
    ready = _check(services, request, tenant)
    with services.admission.reserve(request.num_sequences):
        prompts, num_tokens, length = await _read_prompts(services, request, ready)
        seed = request.given_seed if request.given_seed is not None else secrets.randbits(SEED_BITS)
        progress: ReplyProgress | None = http.scope.get("extensions", {}).get(PROGRESS)
        id, now = prefix + uuid.uuid4().hex, time.time()  # new even for `resume`: the first may run
        spec = _spec(services, tenant, request, prompts, ready, length, id=id, seed=seed)
        generation = Generation(
            spec,
            spec.submit(services.client, arrival=now),
            client=services.client,
            tokenizer=services.tokenizer,
            metrics=services.metrics,
            charge=Charge(services.admission, tenant, num_tokens),
            progress=progress,
        )
        created, fingerprint = int(now), services.fingerprint(ready)
        if request.request_id is not None:
            id = prefix + request.request_id  # not necessarily unique
        if progress is not None:
            id, created = progress.begin(id, created, seed=seed, fingerprint=fingerprint)
    return Call(
        request=request,
        id=id,
        created=created,
        fingerprint=fingerprint,
        seed=seed,
        generation=generation,
        use=prompts.use,
    )


def check_settings(services: Services, request: RequestBody) -> None:
    """Raises ApiError for a field that the present settings refuse (`FieldRow.unless`)."""
    for name in request.model_fields_set:
        row = request.rows()[name]
        if row.unless is None or row.is_neutral(getattr(request, name)):
            continue
        reason = row.unless(services)
        if reason is not None:
            raise unsupported(name, f"is not supported under the present settings: {reason}")


def _check(services: Services, request: CommonRequest, tenant: Tenant) -> Ready:
    """Check all but the prompts against the engine, and return the engine's facts."""
    services.check_model(request.model)
    ready = services.client.require_open()
    check_settings(services, request)
    if request.priority and not tenant.may_prioritise:
        raise unsupported("priority", "may not be set by this API key; it must be 0")
    check_ids(request.biases, ready=ready, param="logit_bias")
    check_ids(request.stop_token_ids, ready=ready, param="stop_token_ids")
    _speculation(request.speculation, ready)
    if (resume := request.resume) is not None:
        check_ids(resume.token_ids, ready=ready, param="resume.token_ids")
        here = services.fingerprint(ready)
        if resume.system_fingerprint not in (None, here):
            problem = f"is not this server's {here}: the reply could not be continued exactly"
            raise invalid("resume.system_fingerprint", problem)
    count, allowed = request.num_sequences, services.admission.max_inflight
    if count > allowed:
        name = "n" if request.fan_out == request.n else "best_of"
        problem = f": with all prompts {count} are asked for; this server admits at most {allowed}"
        raise invalid(name, problem)
    return ready


async def _read_prompts(
    services: Services, request: ChatRequest | CompletionRequest, ready: Ready
) -> tuple[Prompts, int, int]:
    """Return the prompts as tokens, how many they have with `resume`, and the limit on generated
    tokens. Raises ApiError unless they fit the context, the limit on log-probabilities and the
    queue, or for a constraint that cannot be enforced."""
    if isinstance(request, ChatRequest):
        prompts = await of_chat(services, request, ready)
    else:
        prompts = await of_completion(services, request, ready)
    prompts.ids = _last(prompts.ids, request, ready)
    for ids, param in zip(prompts.ids, prompts.params, strict=True):
        _check_context(len(ids), request, ready, param=param)
    num_tokens = sum(map(len, prompts.ids))
    length = _length(num_tokens, request, ready, most=services.config.server.max_logprobs)
    num_tokens += len(request.resume.token_ids) if request.resume is not None else 0
    services.admission.check_tokens(num_tokens)
    if (constraint := request.constraint) is not None:
        await services.grammars.check(constraint.grammar, param=constraint.param)
    prompts.prediction = await of_prediction(services, request, ready)
    return prompts, num_tokens, length


def _last(prompts: list[list[int]], request: CommonRequest, ready: Ready) -> list[list[int]]:
    """Return the prompts, truncated to the last `truncate_prompt_tokens`."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompts
    if keep == -1:
        named = request.length if request.sets_length else None
        keep = max(ready.max_model_len - (1 if named is None else named), 1)
    return [ids[-keep:] for ids in prompts]


def _check_context(size: int, request: CommonRequest, ready: Ready, *, param: str) -> None:
    """Raises ApiError for `param` unless prompt and reply fit the context. Only a `max_tokens` that
    the client set counts; a default is clipped. litellm and langchain look for OpenAI's wording."""
    context = ready.max_model_len
    known = f"This model's maximum context length is {context} tokens, prompt and output together"
    if size == 0:
        raise invalid(param, "is empty; a prompt needs at least one token")
    if size > context or (size == context and request.length != 0):
        raise too_long(param, f"{known}; the prompt is too long: it alone has {size}")
    named = {"max_tokens", "max_completion_tokens"} & request.model_fields_set
    if request.sets_length and request.length is not None and size + request.length > context:
        raise too_long(
            min(named) if request.length >= context else param,
            f"{known}, but {size + request.length} were asked for: {size} in the prompt and"
            f" {request.length} of `{min(named)}`",
        )


def _length(num_tokens: int, request: CommonRequest, ready: Ready, *, most: int) -> int:
    """Return the limit on generated tokens; if the request sets none, `most` log-probabilities
    (alternatives included) bound it. Raises ApiError if more are certain, or possible with the
    length that is set."""
    per_token = 0 if request.prompt_logprobs is None else request.prompt_logprobs + 1
    alternatives = 0 if request.alternatives is None else request.alternatives + 1
    echoed = num_tokens * request.fan_out if request.echoes else 0
    of_prompts = num_tokens * per_token + echoed * alternatives
    each = alternatives * request.num_sequences  # for one generated token of each sequence
    set_length = request.length or 0 if request.sets_length else 0
    count = of_prompts + each * max(request.min_tokens, set_length)
    if count > most:
        name = "prompt_logprobs" if request.prompt_logprobs is not None else request.LOGPROBS
        problem = f"asks for up to {count} log-probabilities in one reply, alternatives included;"
        raise invalid(name, f"{problem} at most {most} are given (`server.max_logprobs`)")
    length = request.length if request.length is not None else ready.max_model_len
    bounded = each and not request.sets_length
    return min(length, max((most - of_prompts) // each, 1)) if bounded else length


def _speculation(options: SpeculationOptions | None, ready: Ready) -> Speculation | None:
    """Return the options for the engine. Raises ApiError for what this engine does not have."""
    if options is None:
        return None
    bound = None if options.max_draft == "auto" else options.max_draft
    if bound is not None and bound > ready.k_max:
        allowed = f'"auto" or an integer from 0 to {ready.k_max}'
        raise wrong("speculation.max_draft", allowed, bound)
    for i, name in enumerate(options.proposers or ()):
        if name not in ready.proposers:
            here = ", ".join(ready.proposers) or "none: speculation is off"
            problem = f": {name} is not available on this server, which has {here}"
            raise invalid(f"speculation.proposers[{i}]", problem)
    proposers = None if options.proposers is None else tuple(options.proposers)
    return Speculation(max_draft=bound if options.enabled else 0, proposers=proposers)


def _spec(
    services: Services,
    tenant: Tenant,
    request: CommonRequest,
    prompts: Prompts,
    ready: Ready,
    length: int,
    *,
    id: str,
    seed: int,
) -> GenerationSpec:
    salt = tenant.salt(request.cache_salt)
    params = _sampling_params(request, prompts, ready, max_tokens=length, seed=seed, salt=salt)
    bounds = (services.config.server.request_timeout_seconds, request.timeout)
    grammar_param = request.constraint.param if request.constraint is not None else None
    return GenerationSpec(
        id=id,
        prompts=prompts.ids,
        params=params,
        drafting=_drafting(params, ready),
        context=ready.max_model_len,
        n=request.n,
        best_of=request.fan_out,
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        shown_tokens=frozenset() if prompts.use is None else shown_tokens(prompts.use.markers),
        continues=not isinstance(request, ChatRequest) or request.continue_final_message,
        thinking=None if prompts.use is None else prompts.use.thinking,
        echoes=prompts.echoes,
        show_logprobs=request.alternatives is not None,
        show_tokens=request.return_token_ids,
        begun=request.resume.token_ids if request.resume is not None else None,
        grammar_param=grammar_param if prompts.grammar is None else "tools",
        tenant=tenant.name,
        weight=tenant.row.weight,
        seconds=min((bound for bound in bounds if bound is not None), default=None),
    )


def _drafting(params: SamplingParams, ready: Ready) -> Drafting:
    """Return the proposers that the request may use, and its bound on draft tokens."""
    proposers = proposers_of(params, ready)
    if not proposers:
        return Drafting()
    bound = None if params.speculation is None else params.speculation.max_draft
    return Drafting(True, "auto" if bound is None else bound, proposers)


def _sampling_params(
    request: CommonRequest, prompts: Prompts, ready: Ready, *, max_tokens: int, seed: int, salt: str
) -> SamplingParams:
    """Return the engine's parameters. Fields of the same name are copied unless changed here."""
    counts = [request.alternatives if prompts.echoes else None, request.prompt_logprobs]
    logprobs = request.alternatives
    if logprobs is None and request.fan_out > request.n:
        logprobs = 0  # to rank the candidates
    grammar = prompts.grammar or request.grammar
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
        "grammar": grammar and replace(grammar, lead=prompts.lead),  # it was checked without
        "cache_salt": salt,
    }
    same = CommonRequest.model_fields.keys() & set(SamplingParams.__struct_fields__)
    return SamplingParams(**{name: getattr(request, name) for name in same} | changed)
