"""EngineClient: the front end's only door to the engine. Owns the sockets and the mailboxes.

Promises: `submit` and `abort` are synchronous and never block; every stream ends exactly once, by
an Output with `finish` or by EngineLost; a slow reader costs one merged Output, never a queue.
Leaves to others: which incarnation to talk to, and what its state means (server.supervisor).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from engine.errors import EngineLost
from engine.messages import (
    Output,
    Ready,
    Submit,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "draining", "lost", "failed", "stopped"]

NOT_READY: dict[EngineState, str] = {
    "starting": "the engine is starting; try again in a moment",
    "draining": "the server is shutting down",
    "lost": "the engine was lost and is being restarted; try again in a moment",
    "failed": "the engine failed and is not being restarted",
    "stopped": "the server is shutting down",
}


class EngineHandle(Protocol):
    """What the HTTP side needs of an engine: EngineClient, or a test's double."""

    @property
    def state(self) -> EngineState: ...

    @property
    def ready(self) -> Ready | None: ...

    @property
    def inflight(self) -> int: ...

    def submit(self, submit: Submit) -> Stream: ...

    def abort(self, ids: Iterable[str]) -> None: ...


class Stream:
    """One request's mailbox. Outputs that arrive while nobody reads are merged into one: tokens
    and logprobs are appended, counters replaced, `finish` kept. One reader at a time."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._latest = Output(id=id)  # merged, but for the two lists below
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._unread = False
        self._failure: str | None = None
        self._ended = False  # the last thing that will ever arrive has arrived
        self._exhausted = False  # and was handed to the reader
        self._wake = asyncio.Event()

    async def next(self) -> Output:
        """The merged Output of everything since the last call; waits if that is nothing.

        Raises EngineLost once if the engine died; tokens that arrived before are handed out first.
        Must not be called again after an Output with `finish` or an EngineLost.
        """
        assert not self._exhausted, f"stream {self.id} was read beyond its end"
        await self._wake.wait()
        if not self._unread:
            self._exhausted = True
            raise EngineLost(self._failure)
        self._exhausted = self._latest.finish is not None
        if not self._ended:
            self._wake.clear()
        return self._take()

    def put(self, output: Output) -> None:
        """Merge one Output in. Refuses anything after the terminal event."""
        assert not self._ended, f"stream {self.id} got an output after its end"
        self._tokens.extend(output.tokens)
        if output.logprobs is not None:
            self._logprobs = self._logprobs if self._logprobs is not None else []
            self._logprobs.extend(output.logprobs)
        earlier = self._latest
        if self._unread and (earlier.cached_tokens is not None or earlier.prompt_logprobs):
            output = msgspec.structs.replace(  # these two come in the first Output only
                output,
                cached_tokens=earlier.cached_tokens,
                prompt_logprobs=earlier.prompt_logprobs,
            )
        self._latest = output
        self._unread = True
        self._ended = output.finish is not None
        self._wake.set()

    def fail(self, sentence: str) -> None:
        """End the stream with EngineLost(sentence)."""
        assert not self._ended, f"stream {self.id} failed after its end"
        self._failure = sentence
        self._ended = True
        self._wake.set()

    def abort(self) -> None:
        """End the stream from this side: finish `abort`, counters as they were."""
        latest = self._latest
        self.put(
            Output(
                id=self.id,
                finish="abort",
                rounds=latest.rounds,
                proposed=latest.proposed,
                accepted=latest.accepted,
            )
        )

    def _take(self) -> Output:
        output = msgspec.structs.replace(self._latest, tokens=self._tokens, logprobs=self._logprobs)
        self._tokens = []
        self._logprobs = None
        self._unread = False
        return output
