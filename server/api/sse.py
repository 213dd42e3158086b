"""Delta -> chunk -> server-sent event.

`[DONE]` comes only after every choice had a real finish. If the engine is lost or refuses, the
stream gets one `data: {"error": ...}` event and is closed without it. `seed` stands on the first
and the last chunk; the last chunk (with `include_usage` the one without choices) has the usage.
A client that leaves cancels the iterator, and whatever happens `close` aborts what is still open.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from json.encoder import encode_basestring as quote  # which json.dumps comes to
from typing import Any, Protocol

from sse_starlette import ServerSentEvent

from engine.errors import EngineError
from server.api.errors import as_api_error
from server.api.event_stream import EventStream, Outlet
from server.api.intake import Call
from server.api.usage import usage_body
from server.generation.choice import Delta

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ChunkShape(Protocol):
    """How one endpoint writes its chunks."""

    kind: str  # the chunk's `object`

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Choices sent before any text."""
        ...

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk's choice each; at least one when the delta has a finish."""
        ...

    def around(self, index: int) -> tuple[str, str] | None:
        """The JSON before and after the text in what `choices` says of a delta that has a text and
        nothing else; None where it takes more than that to know."""
        ...


class GenerationStream(EventStream):
    """The stream of one generation in chunks. `first`: what the first one says besides the seed."""

    def __init__(
        self, call: Call, shape: ChunkShape, *, first: Mapping[str, Any] | None = None
    ) -> None:
        outlet = Outlet()
        super().__init__(call, events(call, shape, first or {}, outlet), outlet=outlet)


async def events(
    call: Call, shape: ChunkShape, first: Mapping[str, Any], outlet: Outlet
) -> AsyncGenerator[bytes, None]:
    """One or several whole events each: what came together leaves together. Most of them go to the
    outlet, and those that it does not take are yielded."""
    chunks, generation = _Chunks(call, shape, {"seed": call.seed, **first}), call.generation

    def pass_on() -> bool:
        writer = outlet.writer
        if writer is None or not writer.is_open:
            return False
        if piece := chunks.of(generation.take()):
            writer.write(piece)
        return not generation.finished

    try:
        if opening := chunks.opening():
            yield opening
        while not generation.finished:
            await generation.news(pass_on)
            if piece := chunks.of(generation.take()):
                yield piece
        yield chunks.ending() + DONE
    except EngineError as error:
        logger.warning("%s ended with an error: %s", call.id, error)
        yield as_event(as_api_error(error).body)
    except Exception as error:
        logger.exception("%s ended with an internal error", call.id)
        yield as_event(as_api_error(error).body)
    finally:
        generation.close()


class _Chunks:
    """The events of one call. Most chunks say a few characters and nothing else: all but those is
    written once."""

    def __init__(self, call: Call, shape: ChunkShape, first: dict[str, Any]) -> None:
        self._call = call
        self._shape = shape
        self._head = call.head(shape.kind)
        self._common: dict[str, Any] = {"usage": None} if call.include_usage else {}
        self._first = first
        self._around = [self._written(choice.index) for choice in call.generation.choices]

    def opening(self) -> bytes:
        choices = self._shape.opening(len(self._call.generation.choices))
        return b"".join([self._chunk(choice) for choice in choices])

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._spliced(d) or self._full(d, d is deltas[-1]) for d in deltas])

    def ending(self) -> bytes:
        if not self._call.include_usage:
            return b""
        usage = usage_body(self._call.generation.usage)
        return as_event({**self._head, "choices": [], "usage": usage, "seed": self._call.seed})

    def _spliced(self, delta: Delta) -> bytes | None:
        around = self._around[delta.index]
        if self._first or around is None or delta.says_more or not delta.text:
            return None
        before, after = around
        return f"{before}{quote(delta.text)}{after}".encode()

    def _written(self, index: int) -> tuple[str, str] | None:
        """A whole event before and after the text."""
        around = self._shape.around(index)
        if around is None:
            return None
        head, common = _json(self._head)[:-1], _json(self._common)[1:-1]
        end = f",{common}}}\n\n" if common else "}\n\n"
        return f'data: {head},"choices":[{around[0]}', f"{around[1]}]{end}"

    def _full(self, delta: Delta, last: bool) -> bytes:
        generation, choices = self._call.generation, self._shape.choices(delta)
        ends = last and generation.finished and not self._call.include_usage
        events = [self._chunk(choice) for choice in choices[: len(choices) - ends]]
        if ends:
            usage = usage_body(generation.usage)
            events.append(self._chunk(choices[-1], {"seed": self._call.seed, "usage": usage}))
        return b"".join(events)

    def _chunk(self, choice: dict[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        said = self._first if extra is None else extra
        self._first = {}
        return as_event({**self._head, "choices": [choice], **self._common, **said})


def as_event(data: dict[str, Any], name: str | None = None) -> bytes:
    return ServerSentEvent(_json(data), event=name, sep="\n").encode()


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
