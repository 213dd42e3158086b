"""OpenRequests: those that have not ended, and how an engine process goes on with them where the
one before was lost. A token is a function of target, seed and position, so told what has arrived of
a reply it says the rest of it: nothing is repeated, missing or different.

A request that kills engines must not do so for ever, and none must be taken for it that was merely
there. Those of which nothing came between two losses are suspects: the next engine gets them one by
one, each once something came of the one before, and all others after them. One that was alone with
two of the engines that were lost so ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec.structs import replace

from engine.messages import Abort, Begun, Command, Output, Ready, Speculation, Submit
from server.engine.mailbox import Stream

logger = logging.getLogger(__name__)

Held = Literal["resumed", "too_late", "given_up"]  # what became of a request that was held


class OpenRequest:
    """Its mailbox, and what has arrived of its reply: 4 bytes a token, and the last Output.

    `most`: tokens of prompt and reply. `sent`: the present engine has it. `deaths`: engines that
    were lost with it, in a row, without an Output between; `alone`: those of them that had no other
    request. `cut_at`: when it was cut off first of these times; None: it goes on."""

    def __init__(self, asked: Submit) -> None:
        self.id = asked.id
        self.stream = Stream(asked.id)
        self.most = len(asked.prompt) + asked.params.max_tokens
        self.sent = False
        self.deaths = self.alone = 0
        self.cut_at: float | None = None
        self._asked = asked
        self._tokens = array("I", asked.begun.tokens)
        self._last: Output | None = None

    @property
    def suspicion(self) -> tuple[int, int]:
        """Compares those that may have killed the engine: most do it with their prompt."""
        return self.deaths, -len(self._tokens)

    def put(self, output: Output) -> None:
        """Take in what arrived."""
        self._tokens.extend(output.tokens)
        self._last = output
        self.stream.put(output)

    def submit(self, ready: Ready | None) -> Submit:
        """The request from here on. With other guesses where the engine that introduced itself so
        cannot make those that were asked for; the text does not depend on them."""
        asked, last = self._asked, self._last
        if last is not None:
            so_far = (last.rounds, last.proposed, last.accepted, last.predicted)
            asked = replace(asked, begun=Begun(self._tokens.tolist(), *so_far))
        said = asked.params.speculation
        if said is None or ready is None or _can(said, ready):
            return asked
        return replace(asked, params=replace(asked.params, speculation=None))


def _can(said: Speculation, ready: Ready) -> bool:
    bounded = said.max_draft is None or said.max_draft <= ready.k_max
    return bounded and set(said.proposers or ()) <= set(ready.proposers)


class OpenRequests:
    """By id. `send` takes commands to the present engine, if there is one. A request is held for
    `seconds`, 0: not at all; `on_held` is told what became of it, and how long nothing came."""

    def __init__(
        self,
        send: Callable[[Command], None],
        *,
        seconds: float,
        on_held: Callable[[Held, float], None],
    ) -> None:
        self._send = send
        self.hold_seconds = seconds
        self._on_held = on_held
        self._requests: dict[str, OpenRequest] = {}
        self._suspects: list[OpenRequest] = []  # that the engine has still to be tried with
        self._tried: OpenRequest | None = None  # the one of them that it is tried with
        self._ready: Ready | None = None
        self._sentence = ""  # how the last engine was lost

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, submit: Submit, *, waits: bool = False) -> Stream:
        """To the engine, at once unless it is tried with a suspect. `waits`: for the next one,
        which is awaited; it is held."""
        assert submit.id not in self._requests, f"request id {submit.id} is used twice"
        request = self._requests[submit.id] = OpenRequest(submit)
        if waits:
            request.cut_at = time.monotonic()
            self._watch_held(request.cut_at)
        elif self._tried is None:
            self._submit(request)
        return request.stream

    def abort(self, ids: Iterable[str]) -> None:
        """End these; ids that have ended are passed over."""
        gone = [self._requests.pop(id) for id in ids if id in self._requests]
        for request in gone:
            request.stream.put(Output(id=request.id, finish="abort"))
        self._let_go(gone)

    def deliver(self, items: Iterable[Output]) -> None:
        """Each to its mailbox; what has ended on this side is dropped."""
        requests = self._requests
        for output in items:
            request = requests.get(output.id)
            if request is None:
                continue
            if output.finish is not None:
                del requests[output.id]
            if request.cut_at is not None:
                self._goes_on(request, request.cut_at)
            request.put(output)

    def fail(self, sentence: str) -> None:
        """Every stream raises EngineLost(sentence), after what had already arrived."""
        requests, self._requests = self._requests, {}
        self._suspects, self._tried = [], None
        for request in requests.values():
            request.stream.fail(sentence)

    def hold(self, sentence: str, *, planned: bool) -> int:
        """The engine is gone, which `planned` says is no request's fault. Returns how many of the
        losses before this one a request explains that was given up."""
        if self.hold_seconds == 0:
            self.fail(sentence)
            return 0
        present = [request for request in self._requests.values() if request.sent]
        now = time.monotonic()
        for request in self._requests.values():  # those that wait behind a suspect, too
            request.deaths += request.sent and not planned
            request.alone += request.sent and not planned and len(present) == 1
            request.cut_at = request.cut_at or now
            request.sent = False
        self._suspects, self._tried, self._sentence = [], None, sentence
        if self._requests:
            self._watch_held(now)
        guilty = [request for request in present if request.alone > 1]
        for request in guilty:
            self._give_up(request)
        return sum(request.deaths - 1 for request in guilty)

    def come_back(self, ready: Ready) -> None:
        """To an engine that has just introduced itself so. A request that it may have no room for
        ends here: it would be cut short there."""
        self._ready = ready
        for request in [
            each for each in self._requests.values() if each.most > ready.max_model_len
        ]:
            self._end_held(request, "given_up")
            room = f"it may take {request.most} tokens, the engine now takes {ready.max_model_len}"
            request.stream.fail(f"{self._sentence}; the reply could not go on: {room}")
        suspects = [request for request in self._requests.values() if request.deaths > 1]
        self._suspects = sorted(suspects, key=lambda request: request.suspicion)
        self._submit_next()

    def hurry(self) -> None:
        """Submit all that waits behind a suspect: a draining engine takes nothing later."""
        self._suspects = []
        self._submit_next()

    def _submit(self, request: OpenRequest) -> None:
        request.sent = True
        self._send(request.submit(self._ready))

    def _submit_next(self) -> None:
        """The next suspect, or else all that wait."""
        self._tried = self._suspects.pop() if self._suspects else None
        waiting = [self._tried] if self._tried is not None else self._requests.values()
        for request in waiting:
            if not request.sent:
                self._submit(request)

    def _goes_on(self, request: OpenRequest, cut_at: float) -> None:
        self._on_held("resumed", time.monotonic() - cut_at)
        request.deaths = request.alone = 0
        request.cut_at = None
        if request is self._tried:
            self._submit_next()

    def _give_up(self, request: OpenRequest) -> None:
        said = f"{request.deaths} times in a row, twice with no other request"
        said = f"the engine was lost with this request {said}: {self._sentence}"
        logger.error("%s is not tried again: %s", request.id, said)
        self._end_held(request, "given_up")
        request.stream.put(Output(id=request.id, finish="error", error=said))

    def _watch_held(self, now: float) -> None:
        asyncio.get_running_loop().call_later(self.hold_seconds, self._end_late, now)

    def _end_late(self, cut: float) -> None:
        """What was cut off by then, and has been held for as long as it may be."""
        every = self._requests.values()
        late = [each for each in every if each.cut_at is not None and each.cut_at <= cut]
        for request in late:
            self._end_held(request, "too_late")
            said = f"{self._sentence}; the reply could not go on within {self.hold_seconds:g} s"
            request.stream.fail(said)
        self._let_go(late)

    def _end_held(self, request: OpenRequest, outcome: Held) -> None:
        del self._requests[request.id]
        now = time.monotonic()
        self._on_held(outcome, now - (request.cut_at or now))

    def _let_go(self, gone: list[OpenRequest]) -> None:
        """Of what has ended on this side."""
        if gone:
            self._send(Abort([request.id for request in gone]))
        if self._tried in gone:
            self._submit_next()
        self._suspects = [request for request in self._suspects if request not in gone]
