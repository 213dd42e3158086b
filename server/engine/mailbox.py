"""Stream: one request's mailbox between the engine's events and whoever reads them, and the Wake
on which its reader sleeps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import chain
from weakref import WeakKeyDictionary

import msgspec

from engine.errors import EngineLost
from engine.messages import Output

ACTS_AT_ONCE = 16  # then whatever else the loop has to do


class _Turns:
    """Work that is due, of many streams, a few at a time: a step's tokens of all streams in one go
    would keep a new request waiting for as long as they take. What comes during a turn has its own
    before the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._due = deque[Callable[[], None]]()

    def add(self, work: Callable[[], None], *, ahead: bool) -> None:
        """`work` handles its own errors. `ahead` of all that is due."""
        if not self._due:
            self._call_soon(self._run)
        if ahead:
            self._due.appendleft(work)
        else:
            self._due.append(work)

    def _run(self) -> None:
        due = self._due
        for _ in range(min(ACTS_AT_ONCE, len(due))):
            due.popleft()()
        if due:
            self._call_soon(self._call_soon, self._run)  # behind what the loop learns of now


_turns = WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns]()


def _turns_of(loop: asyncio.AbstractEventLoop) -> _Turns:
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = _Turns(loop)
    return found


class Wake:
    """asyncio.Event for one waiter at a time, who may have his work done while he sleeps: there is
    a waking for each token of a stream, and the way through a task and its coroutines took longer
    than all that the token needs."""

    __slots__ = ("_act", "_later", "_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._act: Callable[[], bool] | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self, *, ahead: bool = False) -> None:
        """`ahead`: of all others that were set and have not been done."""
        if self._set:
            return
        self._set = True
        if self._act is not None:
            self._later(self._try, ahead=ahead)  # so that what comes together is handled together
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> None:
        """Returns once it is set, and leaves it so."""
        while not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def until(self, act: Callable[[], bool]) -> None:
        """Calls `act`, which must clear it, whenever it is set. Returns when `act` returns False,
        raises what `act` raises."""
        while self._set:
            if not act():
                return
        loop = asyncio.get_running_loop()
        self._waiter, self._act, self._later = loop.create_future(), act, _turns_of(loop).add
        try:
            await self._waiter
        finally:
            self._act = None

    def _try(self) -> None:
        act, waiter = self._act, self._waiter
        if act is None or waiter is None or waiter.done():
            return  # cancelled in the meantime
        try:
            if not act():
                waiter.set_result(None)
        except Exception as error:
            waiter.set_exception(error)


class Stream:
    """One request's mailbox. Outputs that arrive while nobody reads are merged into one: tokens,
    logprobs and sources are appended, counters replaced, `finish` kept. One reader at a time.
    `steps`: what the last reading merged, for whoever wants counters of a step in between."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.steps: list[Output] = []
        self._arrived: list[Output] = []
        self._last: Output | None = None  # read or not
        self._failure: str | None = None
        self._ended = False  # the last thing that will ever arrive has arrived
        self._exhausted = False  # and was handed to the reader
        self._wake = Wake()

    @property
    def has_news(self) -> bool:
        """Whether `take` may be called."""
        return bool(self._arrived) or self._failure is not None

    def wake(self, event: Wake) -> None:
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
            self._wake.set()  # still to be told
        return output

    def put(self, output: Output) -> None:
        """Take one Output in. Refuses anything after the terminal event."""
        assert not self._ended, f"stream {self.id} got an output after its end"
        self._arrived.append(output)
        self._last = output
        self._ended = output.finish is not None
        self._wake.set(ahead=output.cached_tokens is not None)  # somebody waits for a first token

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
