"""POST /v1/chat/completions: messages in, one assistant message per choice out."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api.body import read_body
from server.api.gather import gather
from server.api.intake import Prompts, begin, encode
from server.api.logprobs import chat_logprobs
from server.api.schema import parse
from server.api.schema_chat import ChatRequest
from server.api.services import Services
from server.api.sse import GenerationStream
from server.api.usage import usage_body
from server.choice import Delta


def chat_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(http: Request) -> Response:
        body = await read_body(http, services.config.server.max_body_bytes)
        request = parse(body, ChatRequest, "chat")

        async def load(ready: Ready) -> Prompts:
            return await _load(services, request, ready)

        call = await begin(services, request, prefix="chatcmpl", num_prompts=1, load=load)
        if request.stream:
            return GenerationStream(call, ChatChunks())
        wholes = await gather(http, call.generation)
        choices = [
            {
                "index": whole.index,
                "message": {"role": "assistant", "content": whole.text, "refusal": None},
                "logprobs": chat_logprobs(whole.logprobs),
                "finish_reason": whole.finish,
            }
            for whole in wholes
        ]
        usage = usage_body(call.generation.usage)
        reply = {**call.head("chat.completion"), "choices": choices, "usage": usage}
        return JSONResponse({**reply, "seed": call.seed}, headers={"x-request-id": call.id})

    return router


class ChatChunks:
    kind = "chat.completion.chunk"

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": "", "refusal": None}
        return [
            {"index": index, "delta": start, "logprobs": None, "finish_reason": None}
            for index in range(num_choices)
        ]

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": chat_logprobs(delta.logprobs),
            "finish_reason": delta.finish,
        }


async def _load(services: Services, request: ChatRequest, ready: Ready) -> Prompts:
    messages = [message.as_dict() for message in request.messages]
    text = await asyncio.to_thread(services.tokenizer.render, messages)
    ids = await encode(services, text, ready=ready, param="messages", add_special_tokens=False)
    return Prompts([ids])
