"""POST /v1/completions: prompts in, one text per choice out. POST /v1/chat/completions: messages
in, one assistant's message per choice out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.gather import gather
from server.api.intake import Call, start
from server.api.replies import prompt_logprobs, usage_body
from server.api.routes import STREAMED, BodyRouter
from server.api.schema import ChatRequest, CompletionRequest
from server.api.services import Services
from server.api.shapes import ChatShape, CompletionShape
from server.api.sse import EventStream, chunks

TEXT, CHAT, CHUNK = "text_completion", "chat.completion", "chat.completion.chunk"  # objects


def completions_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post("/v1/completions", response_model=replies.Completion, responses=STREAMED)
    async def create_completion(http: Request, request: CompletionRequest) -> Response:
        call = await start(services, request, prefix="cmpl-")
        prompts = call.generation.spec.prompts if request.return_token_ids else None
        shape = CompletionShape(prompts, request.n)
        if request.stream:
            return EventStream(call, chunks(call, TEXT, shape.choices))
        choices = [c for whole in await gather(http, call.generation) for c in shape.choices(whole)]
        if (count := request.prompt_logprobs) is not None:
            for choice in choices:
                number = choice["index"] // request.n
                choice["prompt_logprobs"] = prompt_logprobs(
                    call.generation, number, count, services.tokenizer
                )
        return _whole(call, TEXT, choices, {})

    @router.post("/v1/chat/completions", response_model=replies.ChatCompletion, responses=STREAMED)
    async def create_chat_completion(http: Request, request: ChatRequest) -> Response:
        call = await start(services, request, prefix="chatcmpl-")
        generation, shape = call.generation, ChatShape(call.id, call.use)
        shape.skip(generation.skipped)
        extra: dict[str, Any] = {}
        if request.return_token_ids:
            extra["prompt_token_ids"] = generation.spec.prompts[0]
        if request.stream:
            begins = generation.choices if request.resume is None else []
            opening = [shape.opening(choice.index) for choice in begins]
            events = chunks(call, CHUNK, shape.choices, opening=opening, first=extra)
            return EventStream(call, events)
        choices = [shape.whole(delta) for delta in await gather(http, generation)]
        if (count := request.prompt_logprobs) is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation, 0, count, services.tokenizer)
        return _whole(call, CHAT, choices, extra)

    return router


def _whole(call: Call, kind: str, choices: list[dict[str, Any]], extra: dict[str, Any]) -> Response:
    """`extra`: what stands beside the choices of this request."""
    usage = usage_body(call.generation.usage)
    reply = {**call.head(kind), "choices": choices, "usage": usage, "seed": call.seed, **extra}
    return JSONResponse(reply, headers={"x-request-id": call.id})
