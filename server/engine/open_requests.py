"""OpenRequests: the requests that have not ended, and their resumption after an engine was lost.
The next token depends only on target, seed and the tokens before it, so an engine that gets the
tokens of a reply so far generates exactly the rest: nothing is repeated, missing or different.

A request that crashes engines must not do so for ever, and a request that only ran beside it must
not be blamed. Requests without an Output between two losses are suspects. The next engine gets the
suspects one at a time, each after an Output of the previous one, and then all other requests. A
request that was alone on two lost engines, without an Output in between, ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec.structs import replace

from engine.messages import Abort, Command, Output, Ready, ResumedReply, Speculation, Submit
from server.engine.mailbox import Mailboxes, Stream

logger = logging.getLogger(__name__)

ResumeOutcome = Literal["resumed", "too_late", "given_up"]  # outcome of a held request


class OpenRequest(Stream):
    """`most`: prompt tokens plus max_tokens. `sent`: the current engine has it. `deaths`: engines
    lost in a row while they ran it, without an Output in between; `alone`: how many of them ran
    nothing else."""

    def __init__(self, submit: Submit) -> None:
        super().__init__(submit)
        self.most = len(submit.prompt) + submit.params.max_tokens
        self.sent = False
        self.deaths = self.alone = 0

    def submit(self, ready: Ready | None) -> Submit:
        """Return the Submit that continues the request. Drops its speculation settings if the
        engine `ready` does not support them; the text does not depend on them."""
        submit, last = self.original, self.last
        if last is not None:
            so_far = (last.rounds, last.proposed, last.accepted, last.predicted)
            submit = replace(submit, begun=ResumedReply(self.tokens.tolist(), *so_far))
        settings = submit.params.speculation
        if settings is None or ready is None or _can(settings, ready):
            return submit
        return replace(submit, params=replace(submit.params, speculation=None))


def _can(settings: Speculation, ready: Ready) -> bool:
    bounded = settings.max_draft is None or settings.max_draft <= ready.k_max
    return bounded and set(settings.proposers or ()) <= set(ready.proposers)


class OpenRequests(Mailboxes):
    """Open requests by id. `send` sends commands to the current engine, if any. A request is held
    for up to `seconds` (0: never); `on_held` gets the outcome and the seconds of interruption."""

    _open: dict[str, OpenRequest]

    def __init__(
        self,
        send: Callable[[Command], None],
        *,
        seconds: float,
        on_held: Callable[[ResumeOutcome, float], None],
    ) -> None:
        super().__init__()
        self._send = send
        self.hold_seconds = seconds
        self._on_held = on_held
        self._suspects: list[OpenRequest] = []  # not yet tried; the last one is next
        self._tried: OpenRequest | None = None  # the suspect that runs alone now
        self._ready: Ready | None = None
        self._sentence = ""  # how the last engine was lost

    def __len__(self) -> int:
        return len(self._open)

    def add(self, submit: Submit, *, waits: bool = False) -> Stream:
        """Submit at once, unless a suspect is being tried; return the mailbox. `waits`: hold it for
        the next engine instead."""
        assert submit.id not in self._open, f"request id {submit.id} is used twice"
        request = self._open[submit.id] = OpenRequest(submit)
        if waits:
            request.cut_at = time.monotonic()
            self._watch_held(request.cut_at)
        elif self._tried is None:
            self._submit(request)
        return request

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; ids that have ended are ignored."""
        ended = [self._open.pop(id) for id in ids if id in self._open]
        for request in ended:
            request.put(Output(id=request.id, finish="abort"))
        self._let_go(ended)

    def fail(self, sentence: str) -> None:
        """End every stream with EngineLost(sentence), after the Outputs that have arrived."""
        requests, self._open = self._open, {}
        self._suspects, self._tried = [], None
        for request in requests.values():
            request.fail(sentence)

    def hold(self, sentence: str, *, planned: bool) -> int:
        """Hold all requests, as the engine is gone; `planned`: no request caused it. Return how
        many earlier losses are explained by requests that are given up now."""
        if self.hold_seconds == 0:
            self.fail(sentence)
            return 0
        present = [request for request in self._open.values() if request.sent]
        now = time.monotonic()
        for request in self._open.values():  # including those that wait behind a suspect
            request.deaths += request.sent and not planned
            request.alone += request.sent and not planned and len(present) == 1
            request.cut_at = request.cut_at or now
            request.sent = False
        self._suspects, self._tried, self._sentence = [], None, sentence
        if self._open:
            self._watch_held(now)
        guilty = [request for request in present if request.alone > 1]
        for request in guilty:
            self._give_up(request)
        return sum(request.deaths - 1 for request in guilty)

    def resume_on(self, ready: Ready) -> None:
        """Resume on the engine that sent `ready`. A request that may exceed its context length
        ends here, since its reply would be cut short."""
        self._ready = ready
        for request in [each for each in self._open.values() if each.most > ready.max_model_len]:
            self._end_held(request, "given_up")
            room = f"it may take {request.most} tokens, the engine now takes {ready.max_model_len}"
            request.fail(f"{self._sentence}; the reply could not be resumed: {room}")
        suspects = [request for request in self._open.values() if request.deaths > 1]
        # Tried from the end: most deaths first, then the shortest reply, as prompts crash most.
        suspects.sort(key=lambda request: (request.deaths, -len(request.tokens)))
        self._suspects = suspects
        self._submit_next()

    def submit_all(self) -> None:
        """Submit all requests that wait behind a suspect: a draining engine accepts none later."""
        self._suspects = []
        self._submit_next()

    def _submit(self, request: OpenRequest) -> None:
        request.sent = True
        self._send(request.submit(self._ready))

    def _submit_next(self) -> None:
        """Submit the next suspect or, if there is none, all waiting requests."""
        self._tried = self._suspects.pop() if self._suspects else None
        waiting = [self._tried] if self._tried is not None else self._open.values()
        for request in waiting:
            if not request.sent:
                self._submit(request)

    def _on_resumed(self, stream: OpenRequest, cut_at: float) -> None:
        self._on_held("resumed", time.monotonic() - cut_at)
        stream.deaths = stream.alone = 0
        stream.cut_at = None
        if stream is self._tried:
            self._submit_next()

    def _give_up(self, request: OpenRequest) -> None:
        times = f"{request.deaths} times in a row, twice with no other request"
        message = f"the engine was lost with this request {times}: {self._sentence}"
        logger.error("%s is not tried again: %s", request.id, message)
        self._end_held(request, "given_up")
        request.put(Output(id=request.id, finish="error", error=message))

    def _watch_held(self, now: float) -> None:
        asyncio.get_running_loop().call_later(self.hold_seconds, self._end_late, now)

    def _end_late(self, cut: float) -> None:
        """Fail requests held since time `cut` or earlier: `hold_seconds` are over."""
        every = self._open.values()
        late = [each for each in every if each.cut_at is not None and each.cut_at <= cut]
        for request in late:
            self._end_held(request, "too_late")
            why = f"the reply could not be resumed within {self.hold_seconds:g} s"
            request.fail(f"{self._sentence}; {why}")
        self._let_go(late)

    def _end_held(self, request: OpenRequest, outcome: ResumeOutcome) -> None:
        del self._open[request.id]
        now = time.monotonic()
        self._on_held(outcome, now - (request.cut_at or now))

    def _let_go(self, ended: list[OpenRequest]) -> None:
        """Abort in the engine the requests that ended here; they are no longer suspects."""
        if ended:
            self._send(Abort([request.id for request in ended]))
        if self._tried in ended:
            self._submit_next()
        self._suspects = [request for request in self._suspects if request not in ended]
