"""Stream: one request's mailbox between the engine's events and its reader."""

from __future__ import annotations

import asyncio
from itertools import chain

import msgspec

from engine.errors import EngineLost
from engine.messages import Output


class Stream:
    """One request's mailbox. Outputs that arrive while nobody reads are merged into one: tokens,
    logprobs and sources are appended, counters replaced, `finish` kept. One reader at a time.
    `steps`: what the last reading merged, for counters of single steps."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.steps: list[Output] = []
        self._arrived: list[Output] = []
        self._last: Output | None = None  # read or not
        self._failure: str | None = None
        self._ended = False  # the last thing that will ever arrive has arrived
        self._exhausted = False  # and was handed to the reader
        self._wake = asyncio.Event()

    @property
    def has_news(self) -> bool:
        """Whether `take` may be called."""
        return bool(self._arrived) or self._failure is not None

    def wake(self, event: asyncio.Event) -> None:
        """From now on set this event when something arrives: a reader of several streams sleeps
        on one event for all of them, and clears it before it looks."""
        self._wake = event
        if self.has_news:
            event.set()

    async def next(self) -> Output:
        """What `take` gives, as soon as there is something."""
        assert not self._exhausted, f"stream {self.id} was read beyond its end"
        while not self.has_news:
            self._wake.clear()
            await self._wake.wait()
        return self.take()

    def take(self) -> Output:
        """The merged Output of everything since the last one; there must be something.

        Raises EngineLost once if the engine died; tokens that arrived before are handed out first.
        Must not be called again after an Output with `finish` or an EngineLost.
        """
        assert not self._exhausted, f"stream {self.id} was read beyond its end"
        if not self._arrived:
            self._exhausted = True
            raise EngineLost(self._failure)
        self.steps, self._arrived = self._arrived, []
        output = self.steps[0] if len(self.steps) == 1 else _merged(self.steps)
        self._exhausted = output.finish is not None
        if self._failure is not None:
            self._wake.set()  # the failure is still to come
        return output

    def put(self, output: Output) -> None:
        """Take one Output in. Refuses anything after the terminal event."""
        assert not self._ended, f"stream {self.id} got an output after its end"
        self._arrived.append(output)
        self._last = output
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
        last = self._last if self._last is not None else Output(id=self.id)
        self.put(
            Output(
                id=self.id,
                finish="abort",
                rounds=last.rounds,
                proposed=last.proposed,
                accepted=last.accepted,
                predicted=last.predicted,
            )
        )


def _merged(steps: list[Output]) -> Output:
    """Several steps of one sequence as one; what only a first Output has is the first one's."""
    first = steps[0]
    logprobs = [step.logprobs for step in steps if step.logprobs is not None]
    sources = [step.sources for step in steps if step.sources is not None]
    return msgspec.structs.replace(
        steps[-1],
        tokens=list(chain.from_iterable(step.tokens for step in steps)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        sources=list(chain.from_iterable(sources)) if sources else None,
        cached_tokens=first.cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
    )
