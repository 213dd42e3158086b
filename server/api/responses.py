"""POST /v1/responses: input items in, output items out. Nothing is stored.

The chat code does the work, with the same template, tools, grammars and sampling:
`schema_responses` builds a chat request, and `ResponseEvents` turns its choices into items.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.api import replies
from server.api.errors import ApiError
from server.api.gather import gather
from server.api.intake import Call, start
from server.api.replies import usage_body
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema_responses import LOGPROBS, NOT_STORED, InputTokensRequest, ResponsesRequest
from server.api.services import Services
from server.api.shapes import EXTRAS, ChatShape
from server.api.sse import EventStream, as_events
from server.generation.choice import Delta

Event = dict[str, Any]


def responses_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post("/v1/responses", response_model=replies.Response, responses=STREAMED)
    async def create_response(http: Request, request: ResponsesRequest) -> Response:
        with request.renamed():
            call = await start(services, http, request.chat, prefix="resp_")
        reply = ResponseEvents(
            _base(request, call),
            ChatShape(call.id, call.use, scores_thinking=False),
            lambda: _usage(call),
            with_logprobs=LOGPROBS in request.include,
        )
        if request.stream:
            return EventStream(call, reply)
        with request.renamed():
            [whole] = await gather(http, call.generation)
        *_, last = [*reply.of([whole]), *reply.last()]
        return JSONResponse(last["response"])

    @router.post(
        "/v1/responses/input_tokens", response_model=replies.InputTokens, responses=REFUSALS
    )
    async def count_input_tokens(http: Request, request: InputTokensRequest) -> Response:
        count = await request.num_tokens(services)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    @router.api_route(
        "/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
    )
    async def stored_response(rest: str) -> Response:
        raise ApiError(404, NOT_STORED.rstrip("."), code="not_stored")

    return router


def _usage(call: Call) -> dict[str, Any]:
    """Return chat's usage under this API's field names, and the server's extensions unchanged."""
    usage: dict[str, Any] = {**usage_body(call.generation.usage)}
    output = usage.pop("completion_tokens_details")
    return {
        "input_tokens": usage.pop("prompt_tokens"),
        "input_tokens_details": {"cache_write_tokens": 0, **usage.pop("prompt_tokens_details")},
        "output_tokens": usage.pop("completion_tokens"),
        "output_tokens_details": output,
        **usage,
    }


def _base(request: ResponsesRequest, call: Call) -> dict[str, Any]:
    """Return the part of the Response that repeats the request, with defaults filled in."""
    chat, sent = request.chat, request.sent
    ids = {"prompt_token_ids": call.generation.spec.prompts[0]} if chat.return_token_ids else {}
    text = {"verbosity": None, **sent.get("text", {})}
    return {
        **ids,
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "model": request.model,
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


@dataclass
class ResponseEvents:
    """Builds the output items of a Response, and their events, from a chat reply.

    The input is the choices of chat chunks; an unstreamed reply is a single chunk, so a Response
    equals the sum of its stream's events. The tests check the order: created, in_progress; for each
    item output_item.added, then for text content_part.added, output_text.delta ...,
    output_text.done, content_part.done, for thinking the same with reasoning_text, for a call
    function_call_arguments.delta ..., .done, then output_item.done; finally one of completed,
    incomplete, failed. One item is open at a time; sequence numbers rise by one. Extensions that a
    chat choice has beside its text (`EXTRAS`) are complete in the last Response, and in streams
    also on the next delta event.

    `base` is the Response without its output, status, usage and error. Log-probabilities cover only
    the text before the first call. A failed reply ends with response.failed; there is no [DONE]."""

    base: dict[str, Any]
    shape: ChatShape
    usage: Callable[[], dict[str, Any]]
    with_logprobs: bool = False
    draw_id: Callable[[str], str] = lambda prefix: f"{prefix}_{uuid.uuid4().hex}"
    output: list[dict[str, Any]] = field(default_factory=list, init=False)
    _finish: str | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    _open: bool = field(default=False, init=False)  # whether the last output item is open
    _called: bool = field(default=False, init=False)
    _spare: deque[Any] = field(default_factory=deque, init=False)  # logprobs of unsent text
    _bytes_out: int = field(default=0, init=False)  # of text that was sent
    _bytes_scored: int = field(default=0, init=False)  # of text whose logprobs were sent
    _extras: dict[str, list[Any]] = field(default_factory=dict, init=False)
    _fresh: dict[str, list[Any]] = field(default_factory=dict, init=False)  # not sent yet

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return as_events(self._event(kind, response=self.response("in_progress")) for kind in kinds)

    async def feed(self, deltas: list[Delta]) -> bytes:
        return as_events(self.of(deltas))

    def end(self) -> bytes:
        return as_events(self.last())

    def of(self, deltas: list[Delta]) -> Iterator[Event]:
        for delta in deltas:
            for choice in self.shape.choices(delta):
                yield from self.of_choice(choice)

    def of_choice(self, choice: dict[str, Any]) -> Iterator[Event]:
        """Yield the events for one choice of a chat chunk."""
        delta = choice["delta"]
        for name in EXTRAS:
            if name in choice:
                self._extras.setdefault(name, []).extend(choice[name])
                self._fresh.setdefault(name, []).extend(choice[name])
        if self.with_logprobs and not self._called:
            self._spare += (choice["logprobs"] or {}).get("content") or []
        if delta.get("reasoning_content"):
            yield from self._thought(delta["reasoning_content"])
        if delta.get("content"):
            yield from self._text(delta["content"])
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)
        self._finish = choice["finish_reason"] or self._finish

    def last(self) -> Iterator[Event]:
        """Yield the last events of a reply that ended by itself or at its length limit."""
        status = "incomplete" if self._finish == "length" else "completed"
        if not self.output or (self._spare and not self._called):
            yield from self._text("", last=True)
        if self._open:
            yield from self._close(status)
        yield self._event(f"response.{status}", response=self.response(status))

    def fail(self, error: ApiError) -> bytes:
        """Return the last event of a reply that failed; its open item stays unfinished."""
        code = "invalid_prompt" if error.status == 400 else "server_error"  # this API's error codes
        cause = {"code": code, "message": error.message}
        return as_events([self._event("response.failed", response=self.response("failed", cause))])

    def response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the Response in its present state."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.base,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": cut,
            "output": list(self.output),
            "usage": self.usage() if status in ("completed", "incomplete") else None,
            **self._extras,
        }

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    def _text(self, text: str, *, last: bool = False) -> Iterator[Event]:
        if not (self._open and self._item["type"] == "message"):
            item = {"id": self.draw_id("msg"), "type": "message", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            yield from self._begin(item, part | ({"logprobs": []} if self.with_logprobs else {}))
        self._bytes_out += len(text.encode())
        part, logprobs = self._item["content"][0], self._release(last=last)
        part["text"] += text
        if self.with_logprobs:
            part["logprobs"] += logprobs
        if text or logprobs:
            yield self._delta("output_text", text, content_index=0, logprobs=logprobs)

    def _thought(self, text: str) -> Iterator[Event]:
        if not (self._open and self._item["type"] == "reasoning"):
            item = {"id": self.draw_id("rs"), "type": "reasoning", "summary": []}
            yield from self._begin(item, {"type": "reasoning_text", "text": ""})
        self._item["content"][0]["text"] += text
        yield self._delta("reasoning_text", text, content_index=0)

    def _begin(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
        """Add an item whose text is one content part."""
        yield from self._add({**item, "content": []})
        yield self._of_item("content_part.added", content_index=0, part=deepcopy(part))
        self._item["content"] = [part]

    def _release(self, *, last: bool) -> list[Any]:
        """Return the log-probabilities of text that was sent."""
        out: list[Any] = []
        while self._spare and (last or self._bytes_scored < self._bytes_out):
            out.append(self._spare.popleft())
            self._bytes_scored += len(out[-1]["bytes"])
        return [] if self._called else out

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a tool-call delta: its start (with an id) or more arguments."""
        function = call["function"]
        if "id" in call:
            self._called = True
            item = {"id": self.draw_id("fc"), "type": "function_call", "call_id": call["id"]}
            yield from self._add({**item, "name": function["name"], "arguments": ""})
        if text := function.get("arguments"):
            self._item["arguments"] += text
            yield self._delta("function_call_arguments", text)

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        if self._open:
            yield from self._close("completed")
        self.output.append({**item, "status": "in_progress"})
        self._open = True
        yield self._of_output("output_item.added")

    def _close(self, status: str) -> Iterator[Event]:
        self._open, item = False, self._item
        item["status"] = status
        if "content" in item:
            part = item["content"][0]
            scores = {"logprobs": part.get("logprobs", [])} if item["type"] == "message" else {}
            yield self._of_item(
                f"{part['type']}.done", content_index=0, text=part["text"], **scores
            )
            yield self._of_item("content_part.done", content_index=0, part=dict(part))
        else:
            yield self._of_item("function_call_arguments.done", arguments=item["arguments"])
        yield self._of_output("output_item.done")

    def _delta(self, of: str, text: str, **fields: Any) -> Event:
        fresh, self._fresh = self._fresh, {}
        return self._of_item(f"{of}.delta", delta=text, **fields, **fresh)

    def _of_output(self, kind: str) -> Event:
        index = len(self.output) - 1
        return self._event(f"response.{kind}", output_index=index, item=dict(self._item))

    def _of_item(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event
