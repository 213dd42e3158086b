"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

The tokenizer alone does the work, in a worker thread; the engine takes no step for it and need not
be running. What the context could never hold is refused before it is worked on.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api.body import read_body
from server.api.chat_prompt import chat_ids
from server.api.explain import check_settings
from server.api.intake import encode
from server.api.params import check_prompt_ids
from server.api.schema import parse
from server.api.schema_tokenize import DetokenizeRequest, TokenizeRequest
from server.api.services import Services
from server.choice import token_text
from server.generation import ContextLengthExceeded


def tokenize_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(http: Request) -> Response:
        body = await read_body(http, services.config.server.max_body_bytes)
        request = parse(body, TokenizeRequest, "tokenize")
        ready = _admit(services, request)
        with services.admission.reserve(1):
            ids = await _token_ids(services, request, ready)
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
        ready = _admit(services, request)
        _check_tokens(request, ready)
        with services.admission.reserve(1):
            text = await asyncio.to_thread(
                services.tokenizer.decode, request.tokens, skip_special_tokens=False
            )
        return JSONResponse({"prompt": text})

    return router


def _admit(services: Services, request: TokenizeRequest | DetokenizeRequest) -> Ready:
    """The engine's facts for a request that names the right model and allowed fields."""
    if request.model is not None:
        services.check_model(request.model)
    given = {name: getattr(request, name) for name in request.model_fields_set}
    check_settings(given, request.endpoint, services.facts)
    return services.known()


async def _token_ids(services: Services, request: TokenizeRequest, ready: Ready) -> list[int]:
    special = request.add_special_tokens
    if request.messages is None:
        special = True if special is None else special
        text = request.prompt or ""
        return await encode(services, text, ready=ready, param="prompt", add_special_tokens=special)
    return await chat_ids(
        services,
        [message.as_dict() for message in request.messages],
        ready=ready,
        tools=[tool.as_dict() for tool in request.tools],
        add_generation_prompt=request.add_generation_prompt is not False,
        add_special_tokens=bool(special),
    )


def _check_tokens(request: DetokenizeRequest, ready: Ready) -> None:
    size, context = len(request.tokens), ready.max_model_len
    if size > context:
        raise ContextLengthExceeded(
            f"`tokens` has {size} entries; this model's context holds {context}", param="tokens"
        )
    if size:
        check_prompt_ids(request.tokens, ready=ready, param="tokens")
