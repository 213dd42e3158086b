"""POST /v1/completions: prompts in, one text per choice out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.gather import gather
from server.api.intake import start
from server.api.replies import completion_logprobs, prompt_logprobs, provenance_body, usage_body
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema import CompletionRequest
from server.api.services import Services
from server.api.sse import EventStream, chunks
from server.generation.choice import Delta

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


class CompletionShape:
    """How a completion writes its choices, whole or in chunks. `prompts`: their ids, when the
    request wants ids; each choice's stand on its first chunk."""

    def __init__(self, prompts: Sequence[Sequence[int]] | None = None, n: int = 1) -> None:
        self._prompts = prompts
        self._n = n
        self._begun: set[int] = set()

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.logprobs),
            "finish_reason": delta.finish,
            **provenance_body(delta.provenance),
        }
        if self._prompts is not None:
            choice["token_ids"] = list(delta.tokens)
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                choice["prompt_token_ids"] = self._prompts[delta.index // self._n]
        return [choice]
