"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's shapes.

The tokenizer alone does the work, in a worker thread; the engine takes no step for it and need not
be running. What the context could never hold is refused before it is worked on.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, PrivateAttr

from server.api import replies
from server.api.errors import ApiError, invalid, too_long
from server.api.prompts import chat_ids, check_ids, encode
from server.api.request import RequestBody, check_settings, split
from server.api.routes import REFUSALS, BodyRouter
from server.api.schema import ChatRequest, TokenId
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
        request = super().read(own)
        if request.prompt is None and "messages" in shared:
            request._chat = ChatRequest.read({"model": "", **shared})
        elif request.prompt is None:
            message = "`prompt` (a string) or `messages` (a list of messages) is required"
            raise ApiError(400, message, param="prompt", code="missing_field")
        elif shared:
            name = next(iter(shared))
            raise invalid(name, f"`{name}` is not allowed beside `prompt`")
        return request


class DetokenizeRequest(RequestBody):
    endpoint = "detokenize"

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenize_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post("/tokenize", response_model=replies.Tokens, responses=REFUSALS)
    @router.post("/v1/tokenize", response_model=replies.Tokens, responses=REFUSALS)
    async def tokenize(http: Request, request: TokenizeRequest) -> Response:
        if request.model is not None:
            services.check_model(request.model)
        ready, special = services.known(), request.add_special_tokens
        with services.admission.reserve(1):
            if request.chat is not None:
                check_settings(request.chat, services)
                ids = await chat_ids(
                    services, request.chat, ready, add_special_tokens=bool(special)
                )
            else:
                ids = await encode(
                    services,
                    request.prompt or "",
                    ready=ready,
                    param="prompt",
                    add_special_tokens=special is not False,
                )
        token_bytes = services.tokenizer.token_bytes
        strings = [token_text(token_bytes(i)) for i in ids] if request.return_token_strs else None
        reply = {
            "count": len(ids),
            "max_model_len": ready.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return JSONResponse(reply)  # as it is: a dict would be walked value by value first

    @router.post("/detokenize", response_model=replies.Text, responses=REFUSALS)
    @router.post("/v1/detokenize", response_model=replies.Text, responses=REFUSALS)
    async def detokenize(http: Request, request: DetokenizeRequest) -> Response:
        if request.model is not None:
            services.check_model(request.model)
        ready = services.known()
        size, context = len(request.tokens), ready.max_model_len
        if size > context:
            message = f"`tokens` has {size} entries; this model's context holds {context}"
            raise too_long("tokens", message)
        check_ids(request.tokens, ready=ready, param="tokens")
        with services.admission.reserve(1):
            text = await asyncio.to_thread(
                services.tokenizer.decode, request.tokens, skip_special_tokens=False
            )
        return JSONResponse({"prompt": text})

    return router
