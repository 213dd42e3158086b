"""From the entries of a prompts file to the very sequences that the server would submit for them.

The server's own code reads each body, with a client in place of the engine's that records what is
submitted; so fields mean here what they mean there, and what the server would refuse is refused in
its words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import msgspec

from engine.errors import EngineError
from engine.messages import Output, Ready, Submit
from server.api.chat import start_chat
from server.api.completions import CompletionRequest, start_completion
from server.api.errors import ApiError, as_api_error
from server.api.limits import MAX_LENGTH_FIELD
from server.api.request import parse
from server.api.schema import ChatRequest
from server.api.services import Services
from server.config import Config
from server.engine.client import Admission, EngineClient
from server.engine.mailbox import Stream
from server.generation.choice import Choice
from server.generation.structured import GrammarChecker, grammar_checker
from server.lab.evaluate.kinds import Kind, kind_of, title_of
from server.lab.evaluate.prompts import Entry, PromptsError
from server.observe.metrics import Metrics
from server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Task:
    """One sequence. `choice` reads its text as the server would, to end it at a stop string, if
    `unsettled`: it has some and plain decoding did not run yet. `reply`: tokens of the longest text
    so far."""

    number: int
    entry: Entry
    kind: Kind
    title: str
    submit: Submit
    choice: Choice
    unsettled: bool
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
        """`text` is that of plain decoding; nothing is generated after a stop string any more."""
        self.unsettled = False
        for token in text:
            self.choice.feed(Output(id=self.submit.id, tokens=[token]))
            if self.choice.finish is not None:
                self.limit(self.choice.usage.completion_tokens)
                return


class Recorder(EngineClient):
    """Records what is submitted and never answers."""

    def __init__(self, ready: Ready) -> None:
        super().__init__()
        self.state = "ready"
        self.ready = ready
        self.submits: list[Submit] = []

    def submit(self, submit: Submit) -> Stream:
        self.submits.append(submit)
        return Stream(submit.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """`path`: of the prompts, for sentences about them. `temperatures`: of prompts that do not say
    their own, one task each; `seed` likewise. `max_tokens`: of a reply, whatever its body says.
    `chat`: plain text is a user's message, not text to be completed."""

    path: str
    temperatures: Sequence[float]
    max_tokens: int
    chat: bool
    seed: int


async def make_tasks(
    config: Config,
    tokenizer: Tokenizer,
    ready: Ready,
    entries: Sequence[Entry],
    defaults: Defaults,
) -> list[Task]:
    """One for each entry, temperature, prompt and choice. Raises PromptsError."""
    grammars = grammar_checker(config)
    recorder = Recorder(ready)
    services = _services(config, tokenizer, recorder, grammars, defaults.seed)
    tasks: list[Task] = []
    try:
        for entry in entries:
            for own, body in _bodies(entry, defaults):
                recorder.submits.clear()
                with _line_of(own, defaults.path):
                    made = await _choices(services, own, body)
                for submit, (choice, stops) in zip(recorder.submits, made, strict=True):
                    kind, title = kind_of(body), title_of(body)
                    tasks.append(Task(len(tasks), own, kind, title, submit, choice, stops))
                    tasks[-1].limit(defaults.max_tokens)
                    if submit.params.max_tokens == 0:
                        raise PromptsError(
                            f"{defaults.path}, line {entry.line}: `max_tokens` is 0, so there is"
                            " nothing to measure"
                        )
    finally:
        await grammars.close()
    return tasks


def _bodies(entry: Entry, defaults: Defaults) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """At each temperature, as requests of the entry's endpoint."""
    body = entry.body
    if entry.plain and defaults.chat:
        entry = replace(entry, endpoint="chat")
        body = {"messages": [{"role": "user", "content": body["prompt"]}]}
    if body.get("temperature") is not None:
        yield entry, body
        return
    for temperature in defaults.temperatures:
        yield entry, body | {"temperature": temperature}


async def _choices(
    services: Services, entry: Entry, body: dict[str, Any]
) -> list[tuple[Choice, bool]]:
    """Submit one request; its choices, and whether they have stop strings."""
    request = _request(entry, body | {"model": services.config.model_name})
    if isinstance(request, ChatRequest):
        call, _ = await start_chat(services, request, prefix="")
    else:
        call = await start_completion(services, request, prefix="")
    return [(choice, bool(call.generation.spec.stop)) for choice in call.generation.choices]


def _services(
    config: Config, tokenizer: Tokenizer, recorder: Recorder, grammars: GrammarChecker, seed: int
) -> Services:
    return Services(
        config=config,
        tokenizer=tokenizer,
        client=recorder,
        metrics=Metrics(),
        admission=Admission(recorder, config.max_inflight),
        grammars=grammars,
        version=version("foredraft"),
        monotonic=time.monotonic,
        wall=time.time,
        draw_seed=lambda: seed,
    )


def check_bodies(entries: Iterable[Entry], path: str) -> None:
    """What they show by themselves, without a model. Raises PromptsError."""
    for entry in entries:
        if not entry.plain:
            with _line_of(entry, path):
                _request(entry, entry.body | {"model": ""})


def any_engine(config: Config) -> Ready:
    """In place of an engine that has not started: takes every token and, if the configuration does
    not limit it, every length."""
    return Ready(
        pid=0, target=config.engine.target.path,
        max_model_len=config.engine.target.max_model_len or 2**62, vocab_size=2**62,
        eos_ids=[], num_blocks=0, block_size=config.engine.cache.block_size, dtype="", device="",
        attention="", proposer="", controller="", k_max=config.engine.speculation.k_max,
    )  # fmt: skip


@contextmanager
def _line_of(entry: Entry, path: str) -> Iterator[None]:
    """A refusal as one of the line."""
    try:
        yield
    except (ApiError, EngineError) as error:
        known = as_api_error(error)
        if known.status >= 500:
            raise
        raise PromptsError(f"{path}, line {entry.line}: {known.message}") from None


def _request(entry: Entry, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    """Without a field for its length, a line that is no batch request may be as long as others.
    Raises ApiError."""
    if body.get("speculation") is not None:
        raise ApiError(400, "`speculation` is what is evaluated here; leave it out")
    if entry.endpoint == "chat":
        return parse(_as_sent(body), ChatRequest)
    if entry.batch or body.get("max_tokens") is not None:
        return parse(_as_sent(body), CompletionRequest)
    data = _as_sent(body | {"max_tokens": MAX_LENGTH_FIELD})
    request = parse(data, CompletionRequest)
    return request.model_copy(update={"max_tokens": None})


def _as_sent(body: dict[str, Any]) -> bytes:
    """As a client would send it. Raises ApiError for what is no Unicode text."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "a text holds half of a surrogate pair, which is no text") from None
