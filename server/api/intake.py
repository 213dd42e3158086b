"""Intake: from a request to a started Generation, the same for all endpoints that generate.

Order, so that the cheap refusals come first: body within its cap (413, `body`), JSON and fields
(400, `schema`), model name (404), engine ready (503), room (429), the grammar in a child process
(400), tokenising (a long text in a worker thread), context (400). Leaves response shapes to the
endpoints.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from engine.messages import Grammar, Ready
from server.api.errors import ClientGone, ContextLengthExceeded, invalid
from server.api.explain import check_settings
from server.api.params import (
    check_ids,
    check_length,
    check_prediction,
    effective,
    engine_wish,
    sampling_params,
)
from server.api.schema import CommonRequest
from server.api.services import Services
from server.generation.annotations import Origin, TextLogprobs
from server.generation.choice import Finish
from server.generation.generation import Generation
from server.generation.generation_spec import Echo, GenerationSpec

T = TypeVar("T")
SHORT = 1024  # characters: tokenised in half a millisecond or so


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


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of every prompt, the field to name when one is too long, what a completion that
    echoes begins with, the special tokens that leave text even where others leave none, and the
    grammar of tool calls, checked."""

    ids: list[list[int]]
    params: list[str]
    echoes: list[Echo] | None = None
    ends: tuple[int, ...] = ()  # tokens that end this text as the end-of-text token does
    shown_tokens: frozenset[int] = frozenset()
    grammar: Grammar | None = None


async def begin(
    services: Services,
    request: CommonRequest,
    *,
    prefix: str,
    num_prompts: int,
    load: Callable[[Ready], Awaitable[Prompts]],
) -> Call:
    """Check the request against the engine's facts, load its prompts and submit it."""
    ready = _checked(services, request)
    count = num_prompts * request.fan_out
    _check_count(services, request, count)
    with services.admission.reserve(count):
        if (constraint := request.constraint) is not None:
            await services.grammars.check(constraint.grammar, param=constraint.param)
        prompts = await load(ready)
        for ids, param in zip(prompts.ids, prompts.params, strict=True):
            check_length(len(ids), request, ready, param=param)
        prediction = await _prediction(services, request, ready)
        seed = request.seed if request.seed is not None else services.draw_seed()
        id = prefix + uuid.uuid4().hex
        generation = Generation(
            _spec(request, prompts, prediction, ready, id=id, seed=seed),
            client=services.client,
            tokenizer=services.tokenizer,
            metrics=services.metrics,
            clock=services.monotonic,
        )
        now = services.wall()
        generation.start(arrival=now)
    return Call(
        id=id,
        created=int(now),
        model=request.model,
        fingerprint=services.fingerprint(ready),
        seed=seed,
        include_usage=request.include_usage,
        generation=generation,
        service_tier=request.service_tier,
    )


def _checked(services: Services, request: CommonRequest) -> Ready:
    """The engine's facts, once the request is known to fit them; its prompts aside."""
    services.check_model(request.model)
    ready = services.require_ready()
    given = {name: getattr(request, name) for name in request.model_fields_set}
    check_settings(given, request.endpoint, services.facts)
    check_ids("logit_bias", request.logit_bias, ready)
    check_ids("stop_token_ids", request.stop_token_ids, ready)
    engine_wish(request.speculation, ready)
    return ready


def _check_count(services: Services, request: CommonRequest, count: int) -> None:
    """Refuse more sequences than could ever be admitted."""
    allowed = services.admission.max_inflight
    if count > allowed:
        name = "n" if request.fan_out == request.n else "best_of"
        raise invalid(
            name, f"prompts times `{name}` is {count}; this server admits at most {allowed}"
        )


def _spec(
    request: CommonRequest,
    prompts: Prompts,
    prediction: tuple[int, ...],
    ready: Ready,
    *,
    id: str,
    seed: int,
) -> GenerationSpec:
    echo = prompts.echoes is not None
    params = sampling_params(
        request, seed, ready, echo=echo, ends=prompts.ends, prediction=prediction
    )
    grammar_param = request.constraint.param if request.constraint is not None else None
    if prompts.grammar is not None:
        params = msgspec.structs.replace(params, grammar=prompts.grammar)
        grammar_param = "tools"
    return GenerationSpec(
        id=id,
        prompts=prompts.ids,
        params=params,
        guessing=effective(params, ready),
        context=ready.max_model_len,
        n=request.n,
        best_of=request.fan_out,
        stop=request.stop,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        shown_tokens=prompts.shown_tokens,
        echoes=prompts.echoes,
        show_logprobs=request.alternatives is not None,
        show_tokens=request.return_token_ids,
        grammar_param=grammar_param,
    )


async def _prediction(services: Services, request: CommonRequest, ready: Ready) -> tuple[int, ...]:
    text, param = request.prediction, "prediction.content"
    if text is None:
        return ()
    ids = await encode(services, text, ready=ready, param=param, add_special_tokens=False)
    return check_prediction(ids, ready)


async def encode(
    services: Services,
    text: str,
    *,
    ready: Ready,
    param: str,
    add_special_tokens: bool,
    plain: bool = False,
) -> list[int]:
    """Token ids of a text, if long in a worker thread. One that cannot fit is not tokenised.
    `plain`: no special token, not even where the text spells one out."""

    def work() -> list[int]:
        check_size(services, text, ready=ready, param=param)
        if plain:
            return services.tokenizer.encode_plain(text)
        return services.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await off_loop(work, size=len(text))


async def off_loop(work: Callable[[], T], *, size: int) -> T:
    """`work()`, which reads `size` characters: in a worker thread, unless it takes less than the
    way there and back while others stream."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def check_size(services: Services, text: str, *, ready: Ready, param: str) -> None:
    """Raises ContextLengthExceeded for more bytes than the context can hold in any tokens."""
    size = len(text.encode("utf-8"))
    if size > ready.max_model_len * services.longest_token:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {ready.max_model_len} tokens, but"
            f" `{param}` has {size} bytes, which is more than they can hold",
            param=param,
        )


@dataclass(slots=True)
class Whole:
    """One choice, complete."""

    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TextLogprobs] | None = None
    finish: Finish = "stop"
    tokens: list[int] = field(default_factory=list)  # their ids, when the request wants them
    provenance: list[Origin] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def gather(http: HttpRequest, generation: Generation) -> list[Whole]:
    """Every wanted choice, numbered in order; raises as `while_there` does."""
    return await while_there(http, generation, _collect(generation))


async def while_there(
    http: HttpRequest, generation: Generation, reading: Coroutine[Any, Any, T]
) -> T:
    """What `reading` makes of the generation. Raises ClientGone when the connection closes first,
    EngineLost or GenerationFailed as the generation does; in each case nothing is left running."""
    work = asyncio.ensure_future(reading)
    watch = asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        generation.close()


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _collect(generation: Generation) -> list[Whole]:
    wholes = [Whole(choice.index) for choice in generation.choices]
    async for delta in generation.deltas():
        whole = wholes[delta.index]
        whole.pieces.append(delta.text)
        if delta.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + delta.logprobs
        whole.tokens += delta.tokens
        if delta.provenance is not None:
            whole.provenance = (whole.provenance or []) + delta.provenance
        whole.finish = delta.finish or whole.finish
    wanted = [wholes[choice.index] for choice in generation.wanted]
    for index, whole in enumerate(wanted):
        whole.index = index
    return wanted
