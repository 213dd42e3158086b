"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api.body import read_body
from server.api.gather import gather
from server.api.intake import Prompts, begin, encode
from server.api.logprobs import completion_logprobs
from server.api.params import check_prompt_ids
from server.api.schema import parse
from server.api.schema_completions import CompletionRequest
from server.api.services import Services
from server.api.sse import GenerationStream
from server.api.usage import usage_body
from server.choice import Delta, Echo


def completions_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(http: Request) -> Response:
        body = await read_body(http, services.config.server.max_body_bytes)
        request = parse(body, CompletionRequest, "completions")

        async def load(ready: Ready) -> Prompts:
            return await _load(services, request, ready)

        call = await begin(
            services, request, prefix="cmpl-", num_prompts=len(request.prompt), load=load
        )
        if request.stream:
            return GenerationStream(call, CompletionChunks())
        wholes = await gather(http, call.generation)
        choices = [
            {
                "index": whole.index,
                "text": whole.text,
                "logprobs": completion_logprobs(whole.logprobs),
                "finish_reason": whole.finish,
            }
            for whole in wholes
        ]
        usage = usage_body(call.generation.usage)
        reply = {**call.head("text_completion"), "choices": choices, "usage": usage}
        return JSONResponse({**reply, "seed": call.seed}, headers={"x-request-id": call.id})

    return router


class CompletionChunks:
    kind = "text_completion"

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return []

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.logprobs),
            "finish_reason": delta.finish,
        }
        return [choice]


async def _load(services: Services, request: CompletionRequest, ready: Ready) -> Prompts:
    all_ids: list[list[int]] = []
    echoes: list[Echo] = []
    for i, prompt in enumerate(request.prompt):
        param = f"prompt[{i}]" if len(request.prompt) > 1 else "prompt"
        if isinstance(prompt, str):
            ids = await encode(services, prompt, ready=ready, param=param, add_special_tokens=True)
            text = prompt
        else:
            check_prompt_ids(prompt, ready=ready, param=param)
            ids, text = prompt, ""
            if request.echo:
                text = services.tokenizer.decode(
                    ids, skip_special_tokens=request.skip_special_tokens
                )
        all_ids.append(ids)
        echoes.append(Echo(text, ids))
    return Prompts(all_ids, echoes if request.echo else None)
