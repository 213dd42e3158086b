"""Mailboxes: from the engine's Outputs to the reader of each request."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec

from engine.errors import EngineLost
from engine.messages import Output, Submit


class Stream:
    """The Outputs of one request; those that arrive between two reads are merged: tokens, logprobs
    and sources are concatenated, counters replaced, `finish` kept. One reader at a time. `wake` is
    set when something arrives; a reader of several streams assigns one shared event to all before
    anything can arrive, and clears it before reading. `steps`: the Outputs merged by the last
    `take`, for per-step counters.

    The reply so far, from which another engine can continue: `tokens`, 4 bytes each, and the `last`
    Output. `cut_at`: monotonic time since which the request has no engine; None: it has one."""

    def __init__(self, original: Submit) -> None:
        self.id = original.id
        self.original = original
        self.wake = asyncio.Event()
        self.steps: list[Output] = []
        self.tokens = array("I", original.begun.tokens)
        self.last: Output | None = None
        self.cut_at: float | None = None
        self._arrived: list[Output] = []
        self._failure: str | None = None
        self._ended = False  # a `finish` or a failure has arrived

    def take(self) -> Output | None:
        """Return everything since the last call as one Output; None if nothing has arrived.

        Raises EngineLost if the engine was lost, once all earlier Outputs were read. Must not be
        called again after an Output with `finish` or an EngineLost.
        """
        if not self._arrived:
            if self._failure is not None:
                raise EngineLost(self._failure)
            return None
        self.steps, self._arrived = self._arrived, []
        output = self.steps[0] if len(self.steps) == 1 else _merged(self.steps)
        if self._failure is not None:
            self.wake.set()  # the next `take` raises the failure
        return output

    def put(self, output: Output) -> None:
        """Add one Output. Asserts that the stream has not ended."""
        assert not self._ended, f"stream {self.id} got an output after its end"
        self._arrived.append(output)
        self.tokens.extend(output.tokens)
        self.last = output
        self._ended = output.finish is not None
        self.wake.set()

    def fail(self, sentence: str) -> None:
        """End the stream with EngineLost(sentence)."""
        assert not self._ended, f"stream {self.id} failed after its end"
        self._failure = sentence
        self._ended = True
        self.wake.set()


class Mailboxes(ABC):
    """The streams of all requests that have not ended, by id."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def deliver(self, items: Iterable[Output]) -> None:
        """Put each Output into its mailbox, those with a first token first, for TTFT; drop Outputs
        of requests that have ended here."""
        for output in sorted(items, key=lambda output: output.cached_tokens is None):
            if (stream := self._open.get(output.id)) is None:
                continue
            if output.finish is not None:
                del self._open[output.id]
            if stream.cut_at is not None:
                self._on_resumed(stream, stream.cut_at)
            stream.put(output)

    @abstractmethod
    def _on_resumed(self, stream: Any, cut_at: float) -> None:
        """The stream is about to get its first Output since it was cut."""


def _merged(steps: list[Output]) -> Output:
    """Merge Outputs of one sequence; fields that only a first Output has come from the first."""
    first = steps[0]
    logprobs = [step.logprobs for step in steps if step.logprobs is not None]
    sources = [step.sources for step in steps if step.sources is not None]
    return msgspec.structs.replace(
        steps[-1],
        tokens=list(chain.from_iterable(step.tokens for step in steps)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        sources=list(chain.from_iterable(sources)) if sources else None,
        cached_tokens=first.cached_tokens,
        queued=first.queued,
        prompt_logprobs=first.prompt_logprobs,
    )
