"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

The tokenizer alone does the work, in a worker thread; the engine takes no step for it and need not
be running. What the context could never hold is refused before it is worked on.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api.body import parse_json, read_body
from server.api.chat import prompt_ids
from server.api.errors import ContextLengthExceeded
from server.api.intake import encode
from server.api.params import check_prompt_ids
from server.api.schema import parse
from server.api.schema_chat import ChatRequest
from server.api.schema_tokenize import DetokenizeRequest, TokenizeRequest, read_tokenize
from server.api.services import Services
from server.generation.annotations import token_text


def tokenize_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(http: Request) -> Response:
        body = await read_body(http, services.config.server.max_body_bytes)
        request, chat = read_tokenize(parse_json(body))
        _check_model(services, request)
        ready = services.known()
        with services.admission.reserve(1):
            ids = await _token_ids(services, request, chat, ready)
        token_bytes = services.tokenizer.token_bytes
        wanted = request.return_token_strs
        reply = {
            "count": len(ids),
            "max_model_len": ready.max_model_len,
            "tokens": ids,
            "token_strs": [token_text(token_bytes(i)) for i in ids] if wanted else None,
        }
        return JSONResponse(reply)  # as it is: a dict would be walked value by value first

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(http: Request) -> Response:
        body = await read_body(http, services.config.server.max_body_bytes)
        request = parse(body, DetokenizeRequest, "detokenize")
        _check_model(services, request)
        ready = services.known()
        _check_tokens(request, ready)
        with services.admission.reserve(1):
            text = await asyncio.to_thread(
                services.tokenizer.decode, request.tokens, skip_special_tokens=False
            )
        return JSONResponse({"prompt": text})

    return router


def _check_model(services: Services, request: TokenizeRequest | DetokenizeRequest) -> None:
    if request.model is not None:
        services.check_model(request.model)


async def _token_ids(
    services: Services, request: TokenizeRequest, chat: ChatRequest | None, ready: Ready
) -> list[int]:
    special = request.add_special_tokens
    if chat is not None:
        return await prompt_ids(services, chat, ready, add_special_tokens=bool(special))
    text, special = request.prompt or "", special is not False
    return await encode(services, text, ready=ready, param="prompt", add_special_tokens=special)


def _check_tokens(request: DetokenizeRequest, ready: Ready) -> None:
    size, context = len(request.tokens), ready.max_model_len
    if size > context:
        raise ContextLengthExceeded(
            f"`tokens` has {size} entries; this model's context holds {context}", param="tokens"
        )
    if size:
        check_prompt_ids(request.tokens, ready=ready, param="tokens")
