"""POST /v1/completions: prompts in, one text per choice out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.gather import gather
from server.api.intake import start
from server.api.replies import prompt_logprobs, usage_body
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema import CompletionRequest
from server.api.services import Services
from server.api.shapes import CompletionShape
from server.api.sse import EventStream, chunks

KIND = "text_completion"


def completions_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(
        "/v1/completions", response_model=replies.Completion, responses=STREAMED | REFUSALS
    )
    async def create_completion(http: Request, request: CompletionRequest) -> Response:
        call = await start(services, request, prefix="cmpl-")
        prompts = call.generation.spec.prompts if request.return_token_ids else None
        shape = CompletionShape(prompts, request.n)
        if request.stream:
            return EventStream(call, chunks(call, KIND, shape.choices))
        choices = [c for whole in await gather(http, call.generation) for c in shape.choices(whole)]
        if (count := request.prompt_logprobs) is not None:
            for choice in choices:
                number = choice["index"] // request.n
                choice["prompt_logprobs"] = prompt_logprobs(
                    call.generation, number, count, services.tokenizer
                )
        usage = usage_body(call.generation.usage)
        reply = {**call.head(KIND), "choices": choices, "usage": usage, "seed": call.seed}
        return JSONResponse(reply, headers={"x-request-id": call.id})

    return router
