"""From the entries of a prompts file to the very sequences that the server would submit for them.

The server's own code reads each body, with a client in place of the engine's that writes down what
is submitted; so fields mean here what they mean there, and what the server would refuse is refused
in its words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import msgspec

from engine.errors import EngineError
from engine.messages import Estimates, Output, Ready, SetSpeculation, Submit
from server.api.chat import start_chat
from server.api.completions import CompletionRequest, start_completion
from server.api.errors import ApiError, as_api_error
from server.api.intake import Call
from server.api.limits import MAX_LENGTH_FIELD
from server.api.schema import parse
from server.api.schema_chat import ChatRequest
from server.api.services import Services
from server.config import Config
from server.generation.admission import Admission
from server.generation.choice import Choice
from server.generation.engine_client import EngineState
from server.generation.mailbox import Stream
from server.generation.structured import Grammars
from server.lab.evaluate.kinds import Kind, kind_of, title_of
from server.lab.evaluate.prompts import Entry, PromptsError
from server.observe.metrics import Metrics
from server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Task:
    """One sequence. `choice` reads its text as the server would, to end it at a stop string, if it
    `stops` at any; `settled` once that has happened. `reply`: tokens of the longest text so far."""

    number: int
    entry: Entry
    kind: Kind
    title: str
    submit: Submit
    choice: Choice
    stops: bool
    settled: bool = False
    reply: int | None = None

    @property
    def greedy(self) -> bool:
        return self.submit.params.temperature == 0

    def limit(self, tokens: int) -> None:
        """No more than so many tokens."""
        params = self.submit.params
        most = min(tokens, params.max_tokens)
        less = msgspec.structs.replace(
            params, max_tokens=most, min_tokens=min(params.min_tokens, most)
        )
        self.submit = msgspec.structs.replace(self.submit, params=less)

    def shortened(self, tokens: int) -> Task:
        """Another one like it, with no more than so many tokens."""
        other = replace(self)
        other.limit(tokens)
        return other

    def settle(self, text: Sequence[int]) -> None:
        """Plain decoding said this. What comes after a stop string is not generated any more."""
        self.settled = True
        for token in text:
            self.choice.feed(Output(id=self.submit.id, tokens=[token]))
            if self.choice.finish is not None:
                self.limit(self.choice.counts.tokens)
                return


def by_turns(tasks: Sequence[Task]) -> list[Task]:
    """Kinds of text in turn, so that a few prompts are of all kinds."""
    kinds: dict[str, list[Task]] = {}
    for task in tasks:
        kinds.setdefault(task.kind, []).append(task)
    return [task for some in zip_longest(*kinds.values()) for task in some if task is not None]


class Recorder:
    """An EngineHandle that writes down what is submitted and never answers."""

    state: EngineState = "ready"
    inflight = 0
    speculation = SetSpeculation("auto")
    estimates: Estimates | None = None

    def __init__(self, ready: Ready) -> None:
        self.ready: Ready | None = ready
        self.submits: list[Submit] = []

    def submit(self, submit: Submit) -> Stream:
        self.submits.append(submit)
        return Stream(submit.id)

    def abort(self, ids: Iterable[str]) -> None:
        return None

    def set_speculation(self, said: SetSpeculation) -> None:
        return None


@dataclass
class TaskMaker:
    """`temperatures`: those at which a prompt runs that does not say its own. `max_tokens`: of a
    reply, whatever its body says."""

    config: Config
    tokenizer: Tokenizer
    grammars: Grammars
    ready: Ready
    path: str
    temperatures: Sequence[float]
    max_tokens: int
    chat: bool  # plain text is what a user says to the model
    seed: int = 0
    tasks: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._recorder = Recorder(self.ready)
        self._services = Services(
            config=self.config,
            tokenizer=self.tokenizer,
            client=self._recorder,
            metrics=Metrics(),
            admission=Admission(self._recorder, self.config.max_inflight),
            grammars=self.grammars,
            version=version("foredraft"),
            monotonic=time.monotonic,
            wall=time.time,
            draw_seed=lambda: self.seed,
        )

    async def add(self, entry: Entry) -> None:
        """Its tasks: one for each temperature, prompt and choice. Raises PromptsError."""
        body = dict(entry.body)
        if entry.plain and self.chat:
            entry = Entry(entry.line, entry.id, "chat", body, plain=True)
            body = {"messages": [{"role": "user", "content": body["prompt"]}]}
        for temperature in (None,) if body.get("temperature") is not None else self.temperatures:
            said = body if temperature is None else body | {"temperature": temperature}
            await self._add(entry, said)

    async def _add(self, entry: Entry, body: dict[str, Any]) -> None:
        with _told_of(entry, self.path):
            call = await self._start(entry, body)
        submits, self._recorder.submits = self._recorder.submits, []
        kind, title = kind_of(body), title_of(body)
        for submit, choice in zip(submits, call.generation.choices, strict=True):
            stops = bool(call.generation.spec.stop)
            task = Task(len(self.tasks), entry, kind, title, submit, choice, stops)
            task.limit(self.max_tokens)
            if task.submit.params.max_tokens == 0:
                raise PromptsError(
                    f"{self.path}, line {entry.line}: `max_tokens` is 0, so there is nothing to"
                    " measure"
                )
            self.tasks.append(task)

    async def _start(self, entry: Entry, body: dict[str, Any]) -> Call:
        request = _request(entry, body | {"model": self.config.model_name})
        if isinstance(request, ChatRequest):
            call, _ = await start_chat(self._services, request, prefix="")
            return call
        return await start_completion(self._services, request, prefix="")


def check_bodies(entries: Iterable[Entry], path: str) -> None:
    """What they show by themselves, without a model. Raises PromptsError."""
    for entry in entries:
        if not entry.plain:
            with _told_of(entry, path):
                _request(entry, entry.body | {"model": ""})


def any_engine(config: Config) -> Ready:
    """The facts of an engine that nobody has started: one that takes every token and, if the
    configuration does not say, every length."""
    return Ready(
        pid=0, target=config.engine.target.path,
        max_model_len=config.engine.target.max_model_len or 2**62, vocab_size=2**62,
        eos_ids=[], num_blocks=0, block_size=config.engine.cache.block_size, dtype="", device="",
        attention="", proposer="", controller="", k_max=config.engine.speculation.k_max,
    )  # fmt: skip


@contextmanager
def _told_of(entry: Entry, path: str) -> Iterator[None]:
    """A refusal as one of the line."""
    try:
        yield
    except (ApiError, EngineError) as error:
        known = as_api_error(error)
        if known.status >= 500:
            raise
        raise PromptsError(f"{path}, line {entry.line}: {known.message}") from None


def _request(entry: Entry, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    """Raises ApiError."""
    if body.get("speculation") is not None:
        raise ApiError(400, "`speculation` is what is evaluated here; leave it out")
    if entry.endpoint == "chat":
        return parse(to_bytes(body), ChatRequest)
    return _completion(entry, body)


def _completion(entry: Entry, body: dict[str, Any]) -> CompletionRequest:
    """Without a word about its length, a line that is no batch request may be as long as others."""
    if entry.batch or body.get("max_tokens") is not None:
        return parse(to_bytes(body), CompletionRequest)
    data = to_bytes(body | {"max_tokens": MAX_LENGTH_FIELD})
    request = parse(data, CompletionRequest)
    return request.model_copy(update={"max_tokens": None})


def to_bytes(body: dict[str, Any]) -> bytes:
    """As a client would send it. Raises ApiError for what is no Unicode text."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "a text holds half of a surrogate pair, which is no text") from None
