"""Gather: a generation as one body, for as long as the client is there to read it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from server.api.errors import ClientGone
from server.api.event_stream import until_gone
from server.generation.annotations import Origin, TextLogprobs
from server.generation.choice import Finish
from server.generation.generation import Generation

T = TypeVar("T")


@dataclass(slots=True)
class Whole:
    """One choice, complete."""

    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TextLogprobs] | None = None
    finish: Finish = "stop"
    tokens: list[int] = field(default_factory=list)  # their ids, when the request wants them
    provenance: list[Origin] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def gather(http: HttpRequest, generation: Generation) -> list[Whole]:
    """Every wanted choice, numbered in order; raises as `while_there` does."""
    return await while_there(http, generation, _collect(generation))


async def while_there(
    http: HttpRequest, generation: Generation, reading: Coroutine[Any, Any, T]
) -> T:
    """What `reading` makes of the generation. Raises ClientGone when the connection closes first,
    EngineLost or GenerationFailed as the generation does; in each case nothing is left running."""
    work = asyncio.ensure_future(reading)
    watch = asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        generation.close()


async def _collect(generation: Generation) -> list[Whole]:
    wholes = [Whole(choice.index) for choice in generation.choices]
    async for delta in generation.deltas():
        whole = wholes[delta.index]
        whole.pieces.append(delta.text)
        if delta.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + delta.logprobs
        whole.tokens += delta.tokens
        if delta.provenance is not None:
            whole.provenance = (whole.provenance or []) + delta.provenance
        whole.finish = delta.finish or whole.finish
    wanted = [wholes[choice.index] for choice in generation.wanted]
    for index, whole in enumerate(wanted):
        whole.index = index
    return wanted
