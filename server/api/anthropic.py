"""POST /v1/messages: Anthropic's Messages API. Turns in, content blocks out.

The chat code does the work, with the same template, tools, grammars and sampling:
`schema_anthropic` builds a chat request, and `MessageEvents` turns its choices into blocks. The
headers `anthropic-version` and `anthropic-beta` have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json

from server.api import replies
from server.api.errors import MESSAGES, ApiError
from server.api.gather import gather
from server.api.intake import Call, start
from server.api.replies import usage_body
from server.api.routes import REASONS, STREAM, BodyRouter, refusals
from server.api.schema_anthropic import CountTokensRequest, MessagesRequest
from server.api.services import Services
from server.api.shapes import EXTRAS, ChatShape
from server.api.sse import EventStream, as_event, as_events
from server.generation.choice import Delta

Event = dict[str, Any]
PING = as_events([{"type": "ping"}])
REFUSALS = refusals(REASONS, replies.MessagesError)


def anthropic_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(MESSAGES, response_model=replies.TurnReply, responses={**STREAM, **REFUSALS})
    async def create_message(http: Request, request: MessagesRequest) -> Response:
        with request.renamed():
            call = await start(services, http, request.chat, prefix="msg_")
        reply = MessageEvents(call, request)
        if request.stream:
            return EventStream(call, reply, ping=PING)
        with request.renamed():
            [whole] = await gather(http, call.generation)
        *_, last = [*reply.of([whole]), *reply.last()]
        assert last["type"] == "message_stop"
        return JSONResponse(reply.message)

    @router.post(f"{MESSAGES}/count_tokens", response_model=replies.TokenCount, responses=REFUSALS)
    async def count_tokens(http: Request, request: CountTokensRequest) -> Response:
        return JSONResponse({"input_tokens": await request.num_tokens(services)})

    return router


class MessageEvents:
    """Builds the content blocks of a message, and their events, from a chat reply.

    The input is the choices of chat chunks; an unstreamed reply is a single chunk, so `message`
    equals the sum of its stream's events. The tests check the order: message_start; for each block
    content_block_start, content_block_delta ..., content_block_stop; message_delta, message_stop.
    One block is open at a time. Extensions that a chat choice has beside its text (`EXTRAS`) are
    in the message, and in streams on the next delta event."""

    def __init__(self, call: Call, request: MessagesRequest) -> None:
        self._generation = call.generation
        self._request = request
        self._shape = ChatShape(call.id, call.use)
        self._begun = False  # message_start was sent
        self._finish: str | None = None  # chat's finish reason
        prompt = call.generation.spec.prompts[0]
        self._content: list[dict[str, Any]] = []
        self.message: dict[str, Any] = {
            "id": call.id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "system_fingerprint": call.fingerprint,
            "seed": call.seed,
            **({"prompt_token_ids": prompt} if request.return_token_ids else {}),
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._input = ""  # arguments of the open call
        self._fresh: dict[str, list[Any]] = {}  # EXTRAS that are not sent yet

    def begin(self) -> bytes:
        return b""  # message_start has the number of cached tokens, which first tokens bring

    async def feed(self, deltas: list[Delta]) -> bytes:
        start = [] if self._begun else [self._start()]
        self._begun = True
        return as_events([*start, *self.of(deltas)])

    def end(self) -> bytes:
        return as_events(self.last())

    def fail(self, error: ApiError) -> bytes:
        error.param = error.param and self._request.name(error.param)
        return as_event(error.body_at(MESSAGES), "error")

    def of(self, deltas: list[Delta]) -> Iterator[Event]:
        for delta in deltas:
            for choice in self._shape.choices(delta):
                yield from self._of_choice(choice)

    def _of_choice(self, choice: dict[str, Any]) -> Iterator[Event]:
        """Yield the events for one choice of a chat chunk."""
        delta = choice["delta"]
        for name in EXTRAS:
            if name in choice:
                self.message.setdefault(name, []).extend(choice[name])
                self._fresh.setdefault(name, []).extend(choice[name])
        if text := delta.get("reasoning_content"):
            yield from self._text(text, "thinking", signature="")
        if text := delta.get("content"):
            yield from self._text(text)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)
        self._finish = choice["finish_reason"] or self._finish

    def last(self) -> Iterator[Event]:
        """Yield the last events. An empty reply has one empty text block."""
        if not self._content:
            yield from self._text("")
        yield from self._close()
        usage, finish, sequence = self._usage(), self._finish, None
        if finish == "length":
            is_full = usage["output_tokens"] < self._request.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif finish == "tool_calls":
            reason = "tool_use"
        else:
            sequence = self._generation.choices[0].stopped_by
            reason = "end_turn" if sequence is None else "stop_sequence"
        ending = {"stop_reason": reason, "stop_sequence": sequence}
        self.message |= {**ending, "usage": usage}
        yield {"type": "message_delta", "delta": ending, "usage": usage, **self._fresh}
        yield {"type": "message_stop"}

    def _start(self) -> Event:
        message = {**self.message, "content": [], "usage": self._usage()}
        return {"type": "message_start", "message": message}

    def _usage(self) -> dict[str, Any]:
        """Return chat's usage under this API's names; input tokens exclude cached ones."""
        usage = usage_body(self._generation.usage)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": "standard",
            "speculation": usage["speculation"],
        }

    def _text(self, text: str, kind: str = "text", **fields: str) -> Iterator[Event]:
        if not (self._content and self._content[-1]["type"] == kind):
            yield from self._add({"type": kind, kind: "", **fields})
        self._content[-1][kind] += text
        if text:
            yield self._delta(f"{kind}_delta", kind, text)

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a tool-call delta: its start (with an id) or more arguments."""
        function = call["function"]
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            yield from self._add(block)
        if text := function.get("arguments"):
            self._input += text
            yield self._delta("input_json_delta", "partial_json", text)

    def _add(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._content.append(block)
        yield self._event("start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        if not self._content:
            return
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _read(self._input)
            self._input = ""
        yield self._event("stop")

    def _delta(self, kind: str, name: str, text: str) -> Event:
        fresh, self._fresh = self._fresh, {}
        return self._event("delta", delta={"type": kind, name: text}, **fresh)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **fields}


def _read(arguments: str) -> dict[str, Any]:
    """Parse possibly truncated arguments; {} if they are no JSON, which a free model may write."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
