"""POST /v1/chat/completions: messages in, one assistant message per choice out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.gather import gather
from server.api.intake import start
from server.api.replies import prompt_logprobs, usage_body
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema import ChatRequest
from server.api.services import Services
from server.api.shapes import ChatShape
from server.api.sse import EventStream, chunks

CHUNK = "chat.completion.chunk"


def chat_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(
        "/v1/chat/completions",
        response_model=replies.ChatCompletion,
        responses=STREAMED | REFUSALS,
    )
    async def create_chat_completion(http: Request, request: ChatRequest) -> Response:
        call = await start(services, request, prefix="chatcmpl-")
        generation, shape = call.generation, ChatShape(call.id, call.use)
        extra: dict[str, Any] = {}
        if request.return_token_ids:
            extra["prompt_token_ids"] = generation.spec.prompts[0]
        if request.stream:
            opening = [shape.opening(choice.index) for choice in generation.choices]
            events = chunks(call, CHUNK, shape.choices, opening=opening, first=extra)
            return EventStream(call, events)
        choices = [shape.whole(delta) for delta in await gather(http, generation)]
        if (count := request.prompt_logprobs) is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation, 0, count, services.tokenizer)
        usage = usage_body(generation.usage)
        reply = {**call.head("chat.completion"), "choices": choices, "usage": usage, **extra}
        return JSONResponse({**reply, "seed": call.seed}, headers={"x-request-id": call.id})

    return router
