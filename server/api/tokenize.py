"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

The tokenizer alone does the work, in a worker thread; the engine takes no step for it and need not
be running. What the context could never hold is refused before it is worked on.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, ValidationError

from engine.messages import Ready
from server.api.body import parse_json, read_body
from server.api.chat import prompt_ids
from server.api.errors import ApiError, ContextLengthExceeded, invalid
from server.api.explain import check_names, explain, must_be
from server.api.fields import ROWS
from server.api.intake import encode
from server.api.params import check_prompt_ids
from server.api.schema import Part, is_ids, parse
from server.api.schema_chat import ChatRequest
from server.api.services import Services
from server.generation.logprobs import token_text


class TokenizeRequest(Part):
    """Of a prompt, or (`chat`) of what a chat request would run."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


def read_tokenize(data: dict[str, Any]) -> tuple[TokenizeRequest, ChatRequest | None]:
    """The request, and the chat request whose prompt it asks for, if not `prompt`'s."""
    given = {name: value for name, value in data.items() if value is not None}
    kept = check_names(given, "tokenize")
    shared = {n: v for n, v in kept.items() if ROWS["chat"].get(n) is ROWS["tokenize"][n]}
    own = {name: value for name, value in kept.items() if name not in shared}
    try:
        request = TokenizeRequest.model_validate(own)
        if request.prompt is None and "messages" not in shared:
            message = "`prompt` (a string) or `messages` (a list of messages) is required"
            raise ApiError(400, message, param="prompt", code="missing_field")
        if request.prompt is None:
            return request, ChatRequest.model_validate({"model": "", **shared})
    except ValidationError as error:
        raise explain(error, "tokenize") from None
    if shared:
        name = next(iter(shared))
        raise invalid(name, f"`{name}` is not allowed beside `prompt`")
    return request, None


def _ids_to_decode(value: Any) -> tuple[int, ...]:
    if not is_ids(value):
        raise must_be("tokens", value, "detokenize")
    return tuple(value)


class DetokenizeRequest(Part):
    model: str | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(_ids_to_decode)]


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
