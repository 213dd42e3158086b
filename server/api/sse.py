"""Delta -> chunk -> server-sent event.

`[DONE]` comes only after every choice had a real finish. If the engine is lost or refuses, the
stream gets one `data: {"error": ...}` event and is closed without it. `seed` stands on the first
and the last chunk; the last chunk (with `include_usage` the one without choices) has the usage.
A client that leaves cancels the iterator, and whatever happens `close` aborts what is still open.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from server.api.errors import as_api_error
from server.api.intake import Call
from server.api.usage import usage_body
from server.choice import Delta
from server.generation import Generation

logger = logging.getLogger(__name__)

PING_SECONDS = 15
SEND_SECONDS = 60.0  # a reader that takes nothing for so long is cut
DONE = "[DONE]"


class ChunkShape(Protocol):
    """How one endpoint writes its chunks."""

    kind: str  # the chunk's `object`

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Choices sent before any text."""
        ...

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk's choice each; at least one when the delta has a finish."""
        ...


class EventStream(EventSourceResponse):
    """The events of one generation, which is closed even if the stream never began."""

    def __init__(self, call: Call, events: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(
            events,
            ping=PING_SECONDS,
            sep="\n",
            send_timeout=SEND_SECONDS,
            headers={"x-request-id": call.id},
        )
        self._generation: Generation = call.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info("cut a client that read nothing for %.0f s", SEND_SECONDS)
        finally:
            self._generation.close()


class GenerationStream(EventStream):
    """The stream of one generation in chunks. `first`: what the first one says besides the seed."""

    def __init__(
        self, call: Call, shape: ChunkShape, *, first: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(call, events(call, shape, first or {}))


async def events(
    call: Call, shape: ChunkShape, first: Mapping[str, Any]
) -> AsyncIterator[ServerSentEvent]:
    try:
        async for chunk in _chunks(call, shape, {"seed": call.seed, **first}):
            yield as_event(chunk)
        yield ServerSentEvent(DONE, sep="\n")
    except EngineError as error:
        logger.warning("%s ended with an error: %s", call.id, error)
        yield as_event(as_api_error(error).body)
    except Exception as error:
        logger.exception("%s ended with an internal error", call.id)
        yield as_event(as_api_error(error).body)


async def _chunks(
    call: Call, shape: ChunkShape, first: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    generation = call.generation
    common: dict[str, Any] = {"usage": None} if call.include_usage else {}
    for choice in shape.opening(len(generation.choices)):
        yield {**call.head(shape.kind), "choices": [choice], **common, **first}
        first = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices = shape.choices(delta)
            for i, choice in enumerate(choices, 1):
                extra = first
                if generation.finished and i == len(choices) and not call.include_usage:
                    extra = {"seed": call.seed, "usage": usage_body(generation.usage)}
                yield {**call.head(shape.kind), "choices": [choice], **common, **extra}
                first = {}
    if call.include_usage:
        usage = usage_body(generation.usage)
        yield {**call.head(shape.kind), "choices": [], "usage": usage, "seed": call.seed}


def as_event(data: dict[str, Any], name: str | None = None) -> ServerSentEvent:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return ServerSentEvent(text, event=name, sep="\n")
