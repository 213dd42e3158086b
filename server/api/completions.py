"""POST /v1/completions returns a text for each choice of its prompts, POST /v1/chat/completions an
assistant message for each choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.api import replies
from server.api.chunks import ChunkWriter, head
from server.api.gather import gather
from server.api.intake import Call, start
from server.api.replies import MANY, encode, many, prompt_logprobs, usage_body
from server.api.routes import STREAMED, BodyRouter
from server.api.schema import ChatRequest, CompletionRequest
from server.api.services import Services
from server.api.shapes import ChatShape, CompletionShape
from server.api.sse import EventStream
from server.generation.choice import Delta

TEXT, CHAT, CHUNK = "text_completion", "chat.completion", "chat.completion.chunk"  # for `object`


def completions_router(services: Services) -> APIRouter:
    router = BodyRouter(services)
    _add_completions(router, services)
    _add_chat(router, services)
    return router


def _add_completions(router: APIRouter, services: Services) -> None:
    @router.post("/v1/completions", response_model=replies.Completion, responses=STREAMED)
    async def create_completion(http: Request, request: CompletionRequest) -> Response:
        call = await start(services, http, request, prefix="cmpl-")
        prompts = call.generation.spec.prompts if request.return_token_ids else None
        shape = CompletionShape(prompts, request.n, resumes=request.resume is not None)
        if request.stream:
            return EventStream(call, ChunkWriter(call, TEXT, shape.choices))
        deltas, count = await gather(http, call.generation), request.prompt_logprobs

        def reply() -> bytes:
            choices = [choice for delta in deltas for choice in shape.choices(delta)]
            if count is not None:
                for choice in choices:
                    number = choice["index"] // request.n
                    choice["prompt_logprobs"] = prompt_logprobs(
                        call.generation, number, count, services.tokenizer
                    )
            return _whole(call, TEXT, choices, {})

        return await _written(call, deltas, reply, scored=count is not None)


def _add_chat(router: APIRouter, services: Services) -> None:
    @router.post("/v1/chat/completions", response_model=replies.ChatCompletion, responses=STREAMED)
    async def create_chat_completion(http: Request, request: ChatRequest) -> Response:
        call = await start(services, http, request, prefix="chatcmpl-")
        generation, shape = call.generation, ChatShape(call.id, call.use)
        shape.skip(generation.choices[0].skipped)
        extra: dict[str, Any] = {}
        if request.return_token_ids and request.resume is None:
            extra["prompt_token_ids"] = generation.spec.prompts[0]
        if request.stream:
            begins = generation.choices if request.resume is None else []
            opening = [shape.opening(choice.index) for choice in begins]
            writer = ChunkWriter(call, CHUNK, shape.choices, opening=opening, first=extra)
            return EventStream(call, writer)
        deltas, count = await gather(http, generation), request.prompt_logprobs

        def reply() -> bytes:
            if count is not None:
                scores = prompt_logprobs(generation, 0, count, services.tokenizer)
                extra["prompt_logprobs"] = scores
            return _whole(call, CHAT, [shape.whole(delta) for delta in deltas], extra)

        return await _written(call, deltas, reply, scored=count is not None)


def _whole(call: Call, kind: str, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
    """Encode a whole reply. `extra`: further fields, which depend on the request."""
    usage = usage_body(call.generation.usage)
    reply = {**head(call, kind), "choices": choices, "usage": usage, "seed": call.seed, **extra}
    return encode(reply)


async def _written(
    call: Call, deltas: Sequence[Delta], reply: Callable[[], bytes], *, scored: bool
) -> Response:
    """Encode `reply`, a long one in a thread. `scored`: it has prompt log-probabilities."""
    is_long = many(deltas) or (scored and call.generation.spec.prompt_tokens > MANY)
    body = await asyncio.to_thread(reply) if is_long else reply()
    return Response(body, media_type="application/json")
