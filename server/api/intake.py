"""Intake: from an HTTP request to a started Generation, the same for both endpoints.

Order, so that the cheap refusals come first: body within its cap (413), JSON and fields (400),
model name (404), engine ready (503), room (429), tokenising in a worker thread, context (400).
Owns what all handlers share (`Services`); leaves response shapes to the endpoints.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from engine.messages import Ready, SamplingParams
from server.api.errors import ApiError, ClientGone, NotReady, invalid
from server.api.schema import CommonRequest
from server.choice import Echo
from server.config import Config
from server.engine_client import NOT_READY, EngineHandle
from server.generation import (
    MASK,
    Admission,
    ContextLengthExceeded,
    Generation,
    GenerationSpec,
    Usage,
)
from server.metrics import Metrics
from server.tokenizer import Tokenizer

GREEDY_BELOW = 1e-4
BODY_SECONDS = 60.0


@dataclass(kw_only=True)
class Services:
    """What the handlers work with; one per app."""

    config: Config
    tokenizer: Tokenizer
    client: EngineHandle
    metrics: Metrics
    admission: Admission
    version: str
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    draw_seed: Callable[[], int]

    def require_ready(self) -> Ready:
        """The engine's facts. Raises NotReady (503) when it takes no requests."""
        ready = self.client.ready
        if self.client.state != "ready" or ready is None:
            raise NotReady(NOT_READY.get(self.client.state, "the engine is not ready"))
        return ready

    def fingerprint(self, ready: Ready) -> str:
        """Changes with whatever may change a reply to the same request: code, model, numerics.
        Speculation does not."""
        facts = (self.version, ready.target, ready.dtype, ready.device, ready.attention)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token; a text of more than that times the context cannot fit."""
        tokenizer = self.tokenizer
        return max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A started generation and what its reply says about it."""

    id: str
    created: int
    model: str
    fingerprint: str
    seed: int  # as the client gave it, or as drawn; the same seed gives the same text
    include_usage: bool
    generation: Generation

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """The body, refused with 413 as soon as it is known to be longer than `limit` bytes."""
    too_large = ApiError(
        413,
        f"the body is larger than {limit} bytes (`server.max_body_bytes`)",
        code="body_too_large",
    )
    length = http.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in http.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_SECONDS:.0f} s", code="body_too_slow"
        ) from None
    return bytes(body)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of every prompt, and what a completion that echoes begins with."""

    ids: list[list[int]]
    echoes: list[Echo] | None = None


async def begin(
    services: Services,
    request: CommonRequest,
    *,
    prefix: str,
    num_prompts: int,
    load: Callable[[Ready], Awaitable[Prompts]],
) -> Call:
    """Check the request against the engine's facts, load its prompts and submit it."""
    config = services.config
    if request.model != config.model_name:
        raise ApiError(
            404,
            f"there is no such model here; this server has `{config.model_name}`",
            param="model",
            code="model_not_found",
        )
    ready = services.require_ready()
    _check_ids("logit_bias", request.logit_bias, ready)
    _check_ids("stop_token_ids", request.stop_token_ids, ready)
    count = num_prompts * request.n
    if count > services.admission.max_inflight:
        allowed = services.admission.max_inflight
        raise invalid("n", f"prompts times `n` is {count}; this server admits at most {allowed}")
    with services.admission.reserve(count):
        prompts = await load(ready)
        for ids in prompts.ids:
            _check_length(len(ids), request, ready)
        seed = request.seed if request.seed is not None else services.draw_seed()
        spec = GenerationSpec(
            id=f"{prefix}-{uuid.uuid4().hex}",
            prompts=prompts.ids,
            params=_params(request, seed, ready, echo=prompts.echoes is not None),
            context=ready.max_model_len,
            n=request.n,
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            echoes=prompts.echoes,
        )
        generation = Generation(
            spec,
            client=services.client,
            tokenizer=services.tokenizer,
            metrics=services.metrics,
            clock=services.monotonic,
        )
        now = services.wall()
        generation.start(arrival=now)
    return Call(
        id=spec.id,
        created=int(now),
        model=config.model_name,
        fingerprint=services.fingerprint(ready),
        seed=seed,
        include_usage=request.include_usage,
        generation=generation,
    )


async def encode(
    services: Services, text: str, *, ready: Ready, param: str, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text, in a worker thread. A text that cannot fit is not tokenised at all."""

    def work() -> list[int]:
        size = len(text.encode("utf-8"))
        if size > ready.max_model_len * services.longest_token:
            raise ContextLengthExceeded(
                f"`{param}` has {size} bytes, which is more than the {ready.max_model_len} tokens"
                " of this model's context can hold",
                param=param,
            )
        return services.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await asyncio.to_thread(work)


def check_prompt_ids(ids: Sequence[int], *, ready: Ready, param: str) -> None:
    for token in (min(ids), max(ids)):  # not one by one: there may be millions
        if not 0 <= token < ready.vocab_size:
            raise _bad_id(param, token, ready)


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, and how speculation went: draft tokens proposed and accepted, and the number
    of sampling steps (rounds) that all completion tokens took."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "speculation": {
            "proposed": usage.proposed,
            "accepted": usage.accepted,
            "rounds": usage.rounds,
        },
    }


def _params(request: CommonRequest, seed: int, ready: Ready, *, echo: bool) -> SamplingParams:
    length = request.length if request.length is not None else ready.max_model_len
    return SamplingParams(
        seed=seed & MASK,
        max_tokens=length,
        temperature=request.temperature if request.temperature >= GREEDY_BELOW else 0.0,
        top_p=request.top_p,
        top_k=request.top_k if 0 < request.top_k < ready.vocab_size else 0,
        min_p=request.min_p,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        logprobs=request.alternatives,
        prompt_logprobs=request.alternatives if echo else None,
        cache_salt=request.cache_salt,
    )


def _check_ids(param: str, ids: Sequence[int] | dict[int, float], ready: Ready) -> None:
    for token in ids:
        if not 0 <= token < ready.vocab_size:
            raise _bad_id(param, token, ready)


def _bad_id(param: str, token: int, ready: Ready) -> ApiError:
    given = str(token) if abs(token) < 10**20 else "a larger number"
    return invalid(
        param,
        f"`{param}`: token ids must be from 0 to {ready.vocab_size - 1}, but {given} was given",
    )


def _check_length(size: int, request: CommonRequest, ready: Ready) -> None:
    """Only a `max_tokens` that the client named is held against it; a default is clipped."""
    param = "messages" if hasattr(request, "messages") else "prompt"
    context = ready.max_model_len
    if size == 0:
        raise invalid(param, f"`{param}` is empty; a prompt needs at least one token")
    if size >= context:
        raise ContextLengthExceeded(
            f"this model's context holds {context} tokens, prompt and output together, but the"
            f" prompt alone has {size}",
            param=param,
        )
    named = {"max_tokens", "max_completion_tokens"} & request.model_fields_set
    if named and request.length is not None and size + request.length > context:
        raise ContextLengthExceeded(
            f"this model's context holds {context} tokens, prompt and output together, but"
            f" {size + request.length} were asked for: {size} in the prompt and {request.length}"
            f" of `{min(named)}`",
            param=min(named) if request.length >= context else param,
        )
