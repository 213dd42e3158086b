"""Gather: collect a generation into whole choices for unstreamed replies, and watch for a client
that disconnects."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import chain

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from server.api.errors import ClientGone
from server.generation.choice import Delta
from server.generation.generation import Generation


async def gather(http: HttpRequest, generation: Generation) -> list[Delta]:
    """Return every wanted choice, whole and numbered in order. Raises ClientGone if the connection
    closes first, EngineLost or GenerationFailed as the generation does. Nothing is left running in
    any of these cases."""
    work = asyncio.ensure_future(_collect(generation))
    watch = asyncio.ensure_future(until_disconnect(http.receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        generation.close()


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _collect(generation: Generation) -> list[Delta]:
    parts: list[list[Delta]] = [[] for _ in generation.choices]
    while not generation.finished:
        for delta in await generation.read():
            parts[delta.index].append(delta)
    return [_joined(i, parts[choice.index]) for i, choice in enumerate(generation.wanted)]


def _joined(index: int, deltas: list[Delta]) -> Delta:
    """Join all deltas of a choice into one."""
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    tokens = [delta.tokens for delta in deltas if delta.tokens is not None]
    origins = [delta.provenance for delta in deltas if delta.provenance is not None]
    return replace(
        deltas[-1],
        index=index,
        text="".join(delta.text for delta in deltas),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        tokens=list(chain.from_iterable(tokens)) if tokens else None,
        provenance=list(chain.from_iterable(origins)) if origins else None,
    )
