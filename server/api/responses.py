"""POST /v1/responses: input items in, output items out. Nothing is stored.

The chat endpoint does the work (`schema_responses` makes its request, `response_events` turns its
choices into items): the same template, tools, grammars and sampling.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.chat import ChatShape
from server.api.errors import ApiError
from server.api.fields import LOGPROBS, NOT_STORED
from server.api.gather import while_connected
from server.api.intake import Call, start
from server.api.prompts import chat_ids
from server.api.replies import usage_body
from server.api.request import check_settings
from server.api.response_events import Event, ResponseEvents
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema_responses import InputTokensRequest, ResponsesRequest
from server.api.services import Services
from server.api.sse import EventStream, as_event, as_logged_error


def responses_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post("/v1/responses", response_model=replies.Response, responses=STREAMED | REFUSALS)
    async def create_response(http: Request, request: ResponsesRequest) -> Response:
        with request.renamed():
            call = await start(services, request.chat, prefix="resp_")
        writer = ResponseEvents(
            _base(request, call),
            with_logprobs=LOGPROBS in request.include,
            with_calls=call.use is not None,
        )
        events = _events(services, call, ChatShape(call.id, call.use), writer)
        if request.chat.stream:
            return EventStream(call, _stream(call, events, writer))
        with request.renamed():
            last = await while_connected(http, call.generation, _last(events))
        return JSONResponse(last["response"], headers={"x-request-id": call.id})

    @router.post(
        "/v1/responses/input_tokens", response_model=replies.InputTokens, responses=REFUSALS
    )
    async def count_input_tokens(http: Request, request: InputTokensRequest) -> Response:
        with request.renamed():
            if request.chat.model:
                services.check_model(request.chat.model)
            with services.admission.reserve(1):
                ready = services.known()
                check_settings(request.chat, services)
                ids = await chat_ids(services, request.chat, ready)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})

    @router.api_route(
        "/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
    )
    async def stored_response(rest: str) -> Response:
        raise ApiError(404, NOT_STORED.rstrip("."), code="not_stored")

    return router


async def _events(
    services: Services, call: Call, shape: ChatShape, writer: ResponseEvents
) -> AsyncGenerator[Event, None]:
    """From created to completed or incomplete; raises as the generation does."""
    for event in writer.begin():
        yield event
    async with aclosing(call.generation.deltas()) as deltas:
        async for delta in deltas:
            for choice in shape.choices(delta):
                for event in writer.feed(choice):
                    yield event
    for event in writer.end(_usage(call), now=int(services.wall())):
        yield event


async def _last(events: AsyncGenerator[Event, None]) -> Event:
    """The Response unstreamed is the one of its stream's last event."""
    last: Event = {}
    async for event in events:
        last = event
    return last


async def _stream(
    call: Call, events: AsyncGenerator[Event, None], writer: ResponseEvents
) -> AsyncGenerator[bytes, None]:
    """A generation that is cut off ends with response.failed. The API has no [DONE]."""
    try:
        async with aclosing(events):
            async for event in events:
                yield as_event(event, event["type"])
    except Exception as error:
        failed = writer.fail(as_logged_error(call, error))
        yield as_event(failed, failed["type"])


def _usage(call: Call) -> dict[str, Any]:
    """Chat's usage under this API's names; the server's own parts as they are."""
    usage: dict[str, Any] = {**usage_body(call.generation.usage)}
    output = usage.pop("completion_tokens_details")
    return {
        "input_tokens": usage.pop("prompt_tokens"),
        "input_tokens_details": {"cache_write_tokens": 0, **usage.pop("prompt_tokens_details")},
        "output_tokens": usage.pop("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": 0, **output},
        **usage,
    }


def _base(request: ResponsesRequest, call: Call) -> dict[str, Any]:
    """What the Response says of its request, defaults filled in."""
    chat, sent = request.chat, request.sent
    ids = {"prompt_token_ids": call.generation.spec.prompts[0]} if chat.return_token_ids else {}
    text = {"verbosity": None, **sent.get("text", {})}
    return {
        **ids,
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "model": call.model,
        "system_fingerprint": call.fingerprint,
        "seed": call.seed,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "tools": sent.get("tools", []),
        "tool_choice": sent.get("tool_choice", "auto"),
        "parallel_tool_calls": chat.parallel_tool_calls is not False,
        "truncation": request.truncation,
        "background": False,
        "store": False,
        "previous_response_id": None,
        "metadata": chat.metadata,
        "user": chat.user,
        "safety_identifier": chat.safety_identifier,
        "prompt_cache_key": chat.prompt_cache_key,
        "service_tier": "default",
    }
