"""Intake: from a request to a started Generation, the same for all endpoints that generate.

Order, so that the cheap refusals come first: body within its cap (413, `body`), JSON and fields
(400, `request`), model name (404), engine ready (503), room (429), tokenizing (a long text in a
worker thread), context (400), the grammar in a child process (400). Leaves response shapes to the
endpoints.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from engine.messages import Ready
from server.api.errors import ClientGone, invalid, too_long
from server.api.params import (
    Prompts,
    check_ids,
    check_length,
    engine_speculation,
    generation_spec,
)
from server.api.request import check_settings
from server.api.schema import CommonRequest
from server.api.services import Services
from server.generation.choice import Delta
from server.generation.generation import Generation

T = TypeVar("T")
SHORT = 1024  # characters: tokenized in half a millisecond or so


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


def check(services: Services, request: CommonRequest, *, num_prompts: int) -> Ready:
    """The engine's facts, once the request is known to fit them; its prompts aside."""
    services.check_model(request.model)
    ready = services.require_ready()
    check_settings(request, services.facts)
    check_ids(request.biases, ready=ready, param="logit_bias")
    check_ids(request.stop_token_ids, ready=ready, param="stop_token_ids")
    engine_speculation(request.speculation, ready)
    count, allowed = num_prompts * request.fan_out, services.admission.max_inflight
    if count > allowed:
        name = "n" if request.fan_out == request.n else "best_of"
        raise invalid(
            name, f"prompts times `{name}` is {count}; this server admits at most {allowed}"
        )
    return ready


async def begin(
    services: Services, request: CommonRequest, prompts: Prompts, ready: Ready, *, prefix: str
) -> Call:
    """Check the request with its prompts, and submit it."""
    for ids, param in zip(prompts.ids, prompts.params, strict=True):
        check_length(len(ids), request, ready, param=param)
    if request.constraint is not None:
        await services.grammars.check(request.constraint.grammar, param=request.constraint.param)
    prediction = await _prediction(services, request, ready)
    seed = request.seed if request.seed is not None else services.draw_seed()
    id = prefix + uuid.uuid4().hex
    generation = Generation(
        generation_spec(request, prompts, prediction, ready, id=id, seed=seed),
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


async def _prediction(services: Services, request: CommonRequest, ready: Ready) -> tuple[int, ...]:
    if request.prediction is None:
        return ()
    text, param, context = request.prediction.text, "prediction.content", ready.max_model_len
    ids = await encode(services, text, ready=ready, param=param, add_special_tokens=False)
    if len(ids) > context:
        raise too_long(
            param,
            f"`{param}` has {len(ids)} tokens; this model's context holds {context}, prompt and"
            " output together",
        )
    return tuple(ids)


async def encode(
    services: Services,
    text: str,
    *,
    ready: Ready,
    param: str,
    add_special_tokens: bool,
    plain: bool = False,
) -> list[int]:
    """Token ids of a text. One that cannot fit is not tokenized. `plain`: no special token, not
    even where the text spells one out."""

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
    """Raises ApiError for more bytes than the context can hold in any tokens."""
    size = len(text.encode("utf-8"))
    if size > ready.max_model_len * services.longest_token:
        raise too_long(
            param,
            f"This model's maximum context length is {ready.max_model_len} tokens, but"
            f" `{param}` has {size} bytes, which is more than they can hold",
        )


async def gather(http: HttpRequest, generation: Generation) -> list[Delta]:
    """Every wanted choice, whole and numbered in order; raises as `while_connected` does."""
    return await while_connected(http, generation, _collect(generation))


async def while_connected(
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


async def _collect(generation: Generation) -> list[Delta]:
    parts: list[list[Delta]] = [[] for _ in generation.choices]
    async for delta in generation.deltas():
        parts[delta.index].append(delta)
    return [_joined(i, parts[choice.index]) for i, choice in enumerate(generation.wanted)]


def _joined(index: int, deltas: list[Delta]) -> Delta:
    """All of a choice as one."""
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    origins = [delta.provenance for delta in deltas if delta.provenance is not None]
    return Delta(
        index,
        "".join(delta.text for delta in deltas),
        list(chain.from_iterable(logprobs)) if logprobs else None,
        deltas[-1].finish,
        list(chain.from_iterable(delta.tokens for delta in deltas)),
        list(chain.from_iterable(origins)) if origins else None,
    )
