"""POST /v1/chat/completions: messages in, one assistant message per choice out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.gather import gather
from server.api.intake import start
from server.api.replies import chat_logprobs, prompt_logprobs, provenance_body, usage_body
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema import ChatRequest
from server.api.services import Services
from server.api.sse import EventStream, chunks
from server.api.tool_use import CallReader, ToolUse, message_of
from server.generation.choice import Delta

CHUNK = "chat.completion.chunk"


def chat_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(
        "/v1/chat/completions",
        response_model=replies.ChatCompletion,
        responses=STREAMED | REFUSALS,
    )
    async def create_chat_completion(http: Request, request: ChatRequest) -> Response:
        call = await start(services, request, prefix="chatcmpl-")
        generation, shape = call.generation, ChatShape(call.id, call.use)
        extra: dict[str, Any] = {}
        if request.return_token_ids:
            extra["prompt_token_ids"] = generation.spec.prompts[0]
        if request.stream:
            opening = [shape.opening(choice.index) for choice in generation.choices]
            events = chunks(call, CHUNK, shape.choices, opening=opening, first=extra)
            return EventStream(call, events)
        choices = [shape.whole(delta) for delta in await gather(http, generation)]
        if (count := request.prompt_logprobs) is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation, 0, count, services.tokenizer)
        usage = usage_body(generation.usage)
        reply = {**call.head("chat.completion"), "choices": choices, "usage": usage, **extra}
        return JSONResponse({**reply, "seed": call.seed}, headers={"x-request-id": call.id})

    return router


class ChatShape:
    """How chat writes its choices, whole or in chunks. With tools a step may say several things
    (content, a call, its arguments): each is a chunk of its own, the logprobs and provenance of all
    of it on the first, the finish on the last."""

    def __init__(self, id: str, use: ToolUse | None = None) -> None:
        self._id = id
        self._use = use
        self._readers: dict[int, CallReader] = {}

    def opening(self, index: int) -> dict[str, Any]:
        content = "" if self._use is None else None
        start = {"role": "assistant", "content": content, "refusal": None}
        return {"index": index, "delta": start, "logprobs": None, "finish_reason": None}

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk's choice each; at least one when the delta has a finish."""
        deltas, finish = self._read(delta)
        beside: dict[str, Any] = {
            "logprobs": chat_logprobs(delta.logprobs),
            **({"token_ids": list(delta.tokens)} if delta.tokens else {}),
            **provenance_body(delta.provenance),
        }
        if not deltas and (finish is not None or any(beside.values())):
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": one, "logprobs": None, "finish_reason": None}
            for one in deltas
        ]
        if choices:
            choices[0] |= beside
            choices[-1]["finish_reason"] = finish
        return choices

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Of a delta that is all of its choice."""
        deltas, finish = self._read(delta)
        return {
            "index": delta.index,
            "message": message_of(deltas),
            "logprobs": chat_logprobs(delta.logprobs),
            "finish_reason": finish,
            **provenance_body(delta.provenance),
            **({"token_ids": list(delta.tokens)} if delta.tokens else {}),
        }

    def _read(self, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas of the message, and the reason of its end."""
        if self._use is None:
            return [{"content": delta.text} if delta.text else {}], delta.finish
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self._use.reader(self._id, delta.index)
        return reader.push(delta.text, delta.finish), reader.finish(delta.finish)
