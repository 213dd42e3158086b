"""Chunks: the events of a streamed completion or chat, and the fields that they share with a reply
in one body.

`[DONE]` is sent only after every choice has finished. A failed generation ends with one
`data: {"error": ...}` event instead. The first and the last chunk have `seed`. As in OpenAI's API,
usage is sent only if `stream_options` asks for it: with `include_usage` on a last chunk without
choices, and null on those before; with `continuous_usage_stats` the counts so far on every chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from server.api.errors import ApiError
from server.api.intake import Call
from server.api.replies import many, usage_body
from server.api.sse import DONE, as_event
from server.generation.choice import Delta

Choices = list[dict[str, Any]]


def head(call: Call, kind: str) -> dict[str, Any]:
    """Return the fields that a reply and all of its chunks have. `kind`: their `object`."""
    tier = {} if call.request.service_tier is None else {"service_tier": "default"}
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": call.request.model,
        "system_fingerprint": call.fingerprint,
        **tier,
    }


class ChunkWriter:
    """Writes chunks of the object `kind`, each with one choice. `choices` maps a delta to choices;
    `opening` are those before any text, `first` fields of the first chunk only."""

    def __init__(
        self,
        call: Call,
        kind: str,
        choices: Callable[[Delta], Choices],
        *,
        opening: Choices | None = None,
        first: dict[str, Any] | None = None,
    ) -> None:
        self._call, self._head, self._choices = call, head(call, kind), choices
        self._options = call.request.stream_options
        self._opening = opening or []
        self._seed: dict[str, Any] = {"seed": call.seed}
        self._extra = {**self._seed, **(first or {})}  # until the first chunk is encoded
        self._no_usage: dict[str, Any] = {"usage": None} if self._options.include_usage else {}

    def begin(self) -> bytes:
        usage = self._usage()
        return b"".join([self._chunk([choice], usage) for choice in self._opening])

    async def feed(self, deltas: list[Delta]) -> bytes:
        """Return a chunk per choice of the deltas; the last may be the last of the stream."""
        usage = self._usage()
        if self._call.generation.spec.show_logprobs and many(deltas):
            return await asyncio.to_thread(self._chunks, deltas, usage)
        return self._chunks(deltas, usage)

    def end(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        usage = {"usage": usage_body(self._call.generation.usage)}
        return self._chunk([], usage, last=True) + DONE

    def fail(self, error: ApiError) -> bytes:
        return as_event(error.body)

    def _usage(self) -> dict[str, Any]:
        """Return the field `usage` of a chunk sent now."""
        if not self._options.continuous_usage_stats:
            return self._no_usage
        return {"usage": usage_body(self._call.generation.usage)}

    def _chunks(self, deltas: list[Delta], usage: dict[str, Any]) -> bytes:
        found = [choice for delta in deltas for choice in self._choices(delta)]
        last = self._call.generation.finished and not self._options.include_usage
        events = [self._chunk([choice], usage) for choice in found[:-1]]
        events += [self._chunk([choice], usage, last=last) for choice in found[-1:]]
        return b"".join(events)

    def _chunk(self, choices: Choices, usage: dict[str, Any], *, last: bool = False) -> bytes:
        more = {**self._extra, **self._seed} if last else self._extra
        event = as_event({**self._head, "choices": choices, **usage, **more})
        self._extra.clear()
        return event
