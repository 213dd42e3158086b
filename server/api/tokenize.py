"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

The tokenizer alone does the work, in a worker thread; the engine takes no step for it and need not
be running. What the context could never hold is refused before it is worked on.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, PrivateAttr, ValidationError

from engine.messages import Ready
from server.api import replies
from server.api.chat import prompt_ids
from server.api.errors import ApiError, ContextLengthExceeded, invalid
from server.api.explain import explain, must_be
from server.api.intake import encode
from server.api.params import check_prompt_ids
from server.api.routes import REFUSALS, BodyRouter
from server.api.schema import RequestBody, TokenId, is_ids, split
from server.api.schema_chat import ChatRequest
from server.api.services import Services
from server.generation.annotations import token_text


class TokenizeRequest(RequestBody):
    """Of a prompt, or (`chat`) of what a chat request would run."""

    endpoint = "tokenize"
    base = ChatRequest

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    _chat: ChatRequest | None = PrivateAttr(None)

    @property
    def chat(self) -> ChatRequest | None:
        """The chat request whose prompt it asks for, if not `prompt`'s."""
        return self._chat

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        own, shared = split(data, "tokenize")
        try:
            request = cls.model_validate(own)
            if request.prompt is None and "messages" not in shared:
                message = "`prompt` (a string) or `messages` (a list of messages) is required"
                raise ApiError(400, message, param="prompt", code="missing_field")
            if request.prompt is None:
                request._chat = ChatRequest.model_validate({"model": "", **shared})
                return request
        except ValidationError as error:
            raise explain(error, "tokenize") from None
        if shared:
            name = next(iter(shared))
            raise invalid(name, f"`{name}` is not allowed beside `prompt`")
        return request


def _ids_to_decode(value: Any) -> tuple[int, ...]:
    if not is_ids(value):
        raise must_be("tokens", value, "detokenize")
    return tuple(value)


class DetokenizeRequest(RequestBody):
    endpoint = "detokenize"

    model: str | None = None
    tokens: Annotated[
        tuple[int, ...], BeforeValidator(_ids_to_decode, json_schema_input_type=list[TokenId])
    ]


def tokenize_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post("/tokenize", response_model=replies.Tokens, responses=REFUSALS)
    @router.post("/v1/tokenize", response_model=replies.Tokens, responses=REFUSALS)
    async def tokenize(http: Request, request: TokenizeRequest) -> Response:
        _check_model(services, request)
        ready = services.known()
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

    @router.post("/detokenize", response_model=replies.Text, responses=REFUSALS)
    @router.post("/v1/detokenize", response_model=replies.Text, responses=REFUSALS)
    async def detokenize(http: Request, request: DetokenizeRequest) -> Response:
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


async def _token_ids(services: Services, request: TokenizeRequest, ready: Ready) -> list[int]:
    special = request.add_special_tokens
    if request.chat is not None:
        return await prompt_ids(services, request.chat, ready, add_special_tokens=bool(special))
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
