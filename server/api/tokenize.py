"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's formats.

The tokenizer alone does the work, in a worker thread, so the engine need not be running. Input
that could never fit the context is refused before any work is done.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from engine.messages import Ready
from server.api import replies
from server.api.errors import invalid, too_long
from server.api.fields import described
from server.api.intake import check_settings
from server.api.prompts import chat_ids, check_ids, encode
from server.api.request import RequestBody
from server.api.routes import REFUSALS, BodyRouter
from server.api.schema import ChatPrompt, Messages, OptionalModel, TokenId
from server.api.services import Services
from server.generation.annotations import token_text


# fmt: off
class TokenizeRequest(ChatPrompt):
    """Tokenizes a prompt, or the prompt that a chat request with these messages has."""

    model: OptionalModel = ""
    messages: Messages = []
    prompt: str | None = described(None, "The text to tokenise.",
        ", and only without `messages`")
    add_special_tokens: bool | None = described(None,
        "Default true for a prompt, as /v1/completions does; false for messages, whose template"
        " writes them.")
    return_token_strs: bool = described(False,
        "Each token's own text too, as logprobs show it.")
    # fmt: on

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        beside = next(iter(self.model_fields_set & ChatPrompt.model_fields.keys()), None)
        if self.prompt is None and not self.messages:
            problem = "(a string) or `messages` (a list of messages) is required"
            raise invalid("prompt", problem, "missing_field")
        if self.prompt is not None and beside is not None:
            raise invalid(beside, "is not allowed beside `prompt`")
        return self


class DetokenizeRequest(RequestBody):
    model: OptionalModel = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = described(
        ...,
        "Special tokens are written out.",
        "a list of token ids below the vocabulary size, at most as many as the context holds",
    )


def tokenize_router(services: Services) -> APIRouter:
    router = BodyRouter(services)
    token_bytes = services.tokenizer.token_bytes

    @router.post("/tokenize", response_model=replies.Tokens, responses=REFUSALS)
    @router.post("/v1/tokenize", response_model=replies.Tokens, responses=REFUSALS)
    async def tokenize(http: Request, request: TokenizeRequest) -> Response:
        ready = services.known(request.model)
        with services.admission.reserve(1):
            ids = await _ids(services, request, ready)
        reply = {
            "count": len(ids),
            "max_model_len": ready.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if request.return_token_strs:
            reply["token_strs"] = [token_text(token_bytes(i)) for i in ids]
        return JSONResponse(reply)  # FastAPI would walk a plain dict value by value

    @router.post("/detokenize", response_model=replies.Text, responses=REFUSALS)
    @router.post("/v1/detokenize", response_model=replies.Text, responses=REFUSALS)
    async def detokenize(http: Request, request: DetokenizeRequest) -> Response:
        ready = services.known(request.model)
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


async def _ids(services: Services, request: TokenizeRequest, ready: Ready) -> list[int]:
    special = request.add_special_tokens
    if request.prompt is None:
        check_settings(services, request)
        return await chat_ids(services, request, ready, add_special_tokens=bool(special))
    special = special is not False
    return await encode(
        services, request.prompt, ready=ready, param="prompt", add_special_tokens=special
    )
