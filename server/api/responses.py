"""POST /v1/responses: input items in, output items out. Nothing is stored.

The chat endpoint does the work (`schema_responses` asks it, `response_events` retells it): the same
template, tools, grammars and sampling. `/v1/responses/input_tokens` counts what it would be asked.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import EngineError
from server.api import replies
from server.api.chat import ChatChunks, prompt_ids, start_chat
from server.api.errors import ApiError, as_api_error
from server.api.fields import LOGPROBS, NOT_STORED
from server.api.intake import Call, while_there
from server.api.replies import usage_body
from server.api.response_events import Event, ResponseEvents
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema_responses import InputTokensRequest, ResponsesRequest
from server.api.services import Services
from server.api.sse import EventStream, as_event

logger = logging.getLogger(__name__)


def responses_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post("/v1/responses", response_model=replies.Response, responses=STREAMED | REFUSALS)
    async def create_response(http: Request, request: ResponsesRequest) -> Response:
        with request.renames.applied():
            call, use = await start_chat(services, request.chat, prefix="resp_")
        chunks = ChatChunks(call.id, use)
        telling = ResponseEvents(
            _base(request, call),
            with_logprobs=LOGPROBS in request.include,
            with_calls=use is not None,
        )
        events = _events(services, call, chunks, telling)
        if request.chat.stream:
            return EventStream(call, _stream(call, events, telling))
        with request.renames.applied():
            last = await while_there(http, call.generation, _last(events))
        return JSONResponse(last["response"], headers={"x-request-id": call.id})

    @router.post(
        "/v1/responses/input_tokens", response_model=replies.InputTokens, responses=REFUSALS
    )
    async def count_input_tokens(http: Request, request: InputTokensRequest) -> Response:
        with request.renames.applied():
            count = await _count(services, request)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    @router.api_route(
        "/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
    )
    async def stored_response(rest: str) -> Response:
        raise ApiError(404, NOT_STORED.rstrip("."), code="not_stored")

    return router


async def _events(
    services: Services, call: Call, chunks: ChatChunks, telling: ResponseEvents
) -> AsyncGenerator[Event, None]:
    """From created to completed or incomplete; raises as the generation does."""
    for event in telling.begin():
        yield event
    async with aclosing(call.generation.deltas()) as deltas:
        async for delta in deltas:
            for choice in chunks.choices(delta):
                for event in telling.feed(choice):
                    yield event
    for event in telling.end(_usage(call), now=int(services.wall())):
        yield event


async def _last(events: AsyncGenerator[Event, None]) -> Event:
    """The Response unstreamed is the one of its stream's last event."""
    last: Event = {}
    async for event in events:
        last = event
    return last


async def _stream(
    call: Call, events: AsyncGenerator[Event, None], telling: ResponseEvents
) -> AsyncGenerator[bytes, None]:
    """A generation that is cut off ends with response.failed. The API has no [DONE]."""
    try:
        async with aclosing(events):
            async for event in events:
                yield as_event(event, event["type"])
    except Exception as error:
        if isinstance(error, EngineError):
            logger.warning("%s ended with an error: %s", call.id, error)
        else:
            logger.exception("%s ended with an internal error", call.id)
        failed = telling.fail(as_api_error(error))
        yield as_event(failed, failed["type"])


async def _count(services: Services, asked: InputTokensRequest) -> int:
    if asked.names_model:
        services.check_model(asked.chat.model)
    ready = services.known()
    with services.admission.reserve(1):
        return len(await prompt_ids(services, asked.chat, ready))


def _usage(call: Call) -> dict[str, Any]:
    """Chat's usage under this API's names; the server's own parts as they are."""
    told = usage_body(call.generation.usage)
    output = told.pop("completion_tokens_details", {})
    return {
        "input_tokens": told.pop("prompt_tokens"),
        "input_tokens_details": {"cache_write_tokens": 0, **told.pop("prompt_tokens_details")},
        "output_tokens": told.pop("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": 0, **output},
        **told,
    }


def _base(own: ResponsesRequest, call: Call) -> dict[str, Any]:
    """What the Response says of its request, defaults filled in."""
    chat = own.chat
    shown = {"type": "text"} if own.text.format is None else own.text.format
    ids = call.generation.spec.prompts[0]
    return {
        **({"prompt_token_ids": ids} if chat.return_token_ids else {}),
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "model": call.model,
        "system_fingerprint": call.fingerprint,
        "seed": call.seed,
        "instructions": own.instructions,
        "max_output_tokens": own.max_output_tokens,
        "max_tool_calls": None,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "top_logprobs": own.top_logprobs or 0,
        "text": {"format": shown, "verbosity": own.text.verbosity},
        "reasoning": {"effort": own.reasoning.effort, "summary": None},
        "tools": own.tools,
        "tool_choice": "auto" if own.tool_choice is None else own.tool_choice,
        "parallel_tool_calls": chat.parallel_tool_calls is not False,
        "truncation": own.truncation,
        "background": False,
        "store": False,
        "previous_response_id": None,
        "metadata": chat.metadata or {},
        "user": chat.user,
        "safety_identifier": chat.safety_identifier,
        "prompt_cache_key": chat.prompt_cache_key,
        "service_tier": "default",
    }
