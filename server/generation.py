"""Generation: one API call. Owns the fan-out into n engine requests per prompt and their end.

Promises: every engine request ends here once, by its finish, by a stop string or by `close`, which
is synchronous so that it may run while being cancelled; text never splits a character and never
shows a part of a stop string. Leaves HTTP shapes to `server.api`, scheduling to the engine.

Seeds: choice 0 of every prompt uses the request's seed itself, choice i the i-th output of
SplitMix64 started there (Steele, Lea, Flood 2014), so any single choice can be replayed with n=1.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.errors import EngineError
from engine.messages import Output, SamplingParams, Submit, TokenLogprobs
from server.choice import Choice, Delta, Echo, GenerationFailed
from server.engine_client import EngineHandle
from server.mailbox import Wake
from server.metrics import Metrics, RequestTimes
from server.metrics_table import Finish
from server.tokenizer import Tokenizer

MASK = 2**64 - 1


class ContextLengthExceeded(EngineError):
    """Prompt plus requested output do not fit the model's context; a caller's error."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Guessing:
    """Who may guess for a request, and how many tokens at most in a step."""

    enabled: bool = False
    max_draft: int | Literal["auto"] = 0
    proposers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What to generate. `params` are those of choice 0; the others differ in the seed alone (and
    score the prompt again only to echo it). `context`: the most tokens that prompt and output may
    have; `max_tokens` is clipped to it. `n` are wanted of the `best_of` (at least `n`) that are
    generated for each prompt. `echoes`: per prompt, the text that the completion begins with; None:
    no echo. `show_logprobs`: of generated tokens, to the client; `show_tokens`: their ids."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    context: int
    n: int = 1
    best_of: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()  # special ones that leave text all the same
    echoes: Sequence[Echo] | None = None
    show_logprobs: bool = True
    show_tokens: bool = False
    guessing: Guessing = Guessing()  # what `params` come to in this engine
    grammar_param: str | None = None  # the field that the grammar came of

    @property
    def fan_out(self) -> int:
        """Sequences per prompt."""
        return max(self.n, self.best_of)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out of one call, and how speculation went. A prompt counts once however many
    choices it has; completion tokens count up to the one that completed a stop string.

    `predicted`: completion tokens that came of the caller's prediction, i.e. were guessed from it
    and drawn by the target too. `mispredicted`: guessed from it and not in the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    proposed: int
    accepted: int
    rounds: int
    predicted: int = 0
    mispredicted: int = 0
    guessing: Guessing = Guessing()


class Generation:
    """`start` submits everything; `deltas` may then be iterated once; `close` ends what is open."""

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        client: EngineHandle,
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.choices: list[Choice] = []
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._began = clock()
        self._first_token: float | None = None  # when the first token of any choice came
        self._arrivals: dict[int, float] = {}  # by choice, when tokens last came
        self._wake = Wake()
        self._open: list[Choice] = []  # not finished
        self._failure: Exception | None = None  # to be raised when what came before it was taken
        self._failed = self._ended = False

    def start(self, *, arrival: float) -> None:
        """Submit every choice; all or none. Raises EngineLost when the engine is not ready."""
        try:
            for prompt_index in range(len(self.spec.prompts)):
                for i in range(self.spec.fan_out):
                    self._submit(prompt_index, i, arrival)
        except BaseException:
            self._failed = True
            self.close()
            raise

    def _submit(self, prompt_index: int, i: int, arrival: float) -> None:
        spec = self.spec
        index = prompt_index * spec.fan_out + i
        prompt = list(spec.prompts[prompt_index])
        max_tokens = min(spec.params.max_tokens, spec.context - len(prompt))
        params = msgspec.structs.replace(
            spec.params,
            seed=choice_seed(spec.params.seed, i),
            max_tokens=max_tokens,
            min_tokens=min(spec.params.min_tokens, max_tokens),
            prompt_logprobs=spec.params.prompt_logprobs if i == 0 or spec.echoes else None,
        )
        stream = self._client.submit(Submit(f"{spec.id}-{index}", prompt, params, arrival))
        choice = Choice(
            index,
            stream,
            tokenizer=self._tokenizer,
            stop=spec.stop,
            include_stop=spec.include_stop,
            skip_special_tokens=spec.skip_special_tokens,
            shown_tokens=spec.shown_tokens,
            min_tokens=params.min_tokens,
            provenance=params.provenance,
            echo=None if spec.echoes is None else spec.echoes[prompt_index],
            show_logprobs=spec.show_logprobs,
            show_tokens=spec.show_tokens,
        )
        stream.wake(self._wake)
        self.choices.append(choice)
        self._open.append(choice)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """As `batches`, one by one."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for delta in batch:
                    yield delta

    async def batches(self) -> AsyncGenerator[list[Delta], None]:
        """Increments of all choices as they come, what came together in one list; each choice's
        last one has its finish. What comes while nobody reads stays in the mailboxes, merged.

        Raises EngineLost if the engine dies, GenerationFailed if it refuses a sequence; either ends
        the whole call.
        """
        try:
            while self._open:
                await self.news()
                if deltas := self.take():
                    yield deltas
        finally:
            self.close()

    async def news(self) -> None:
        """Returns when `take` may have something."""
        await self._wake.wait()

    def take(self) -> list[Delta]:
        """What came since the last time; the caller closes. Raises as `batches`, but only once what
        came before the failure has been taken."""
        self._wake.clear()
        deltas, ended = list[Delta](), False
        try:
            if self._failure is not None:
                raise self._failure
            for choice in self._open:
                if choice.stream.has_news and (delta := self._feed(choice)) is not None:
                    deltas.append(delta)
                    ended = ended or delta.finish is not None
        except Exception as error:
            self._fail(error)
            if not deltas:
                raise
            self._wake.set()
        if ended:
            self._open = [choice for choice in self._open if choice.finish is None]
        return deltas

    def _feed(self, choice: Choice) -> Delta | None:
        output = choice.stream.take()
        self._observe(choice, output)
        delta = choice.feed(output)
        if choice.finish is not None and output.finish is None:
            self._client.abort([choice.stream.id])  # a stop string; the engine goes on
        return delta

    def _fail(self, error: Exception) -> None:
        self._failure, self._failed = error, True
        if isinstance(error, GenerationFailed) and error.bad_request:
            error.param = self.spec.grammar_param

    def close(self) -> None:
        """Abort every choice that is still open in the engine. May be called any number of times,
        and while being cancelled."""
        open_ids = [choice.stream.id for choice in self.choices if choice.close()]
        if open_ids:
            self._client.abort(open_ids)
        if not self._ended:
            self._ended = True
            self._metrics.observe_request(self._times())

    def _observe(self, choice: Choice, output: Output) -> None:
        if not output.tokens:
            return
        now = self._clock()
        before = self._arrivals.get(choice.index)
        if before is not None:
            self._metrics.observe_tokens(len(output.tokens), gap_seconds=now - before)
        elif self._first_token is None:
            self._first_token = now
        self._arrivals[choice.index] = now

    def _times(self) -> RequestTimes:
        finish: Finish = "abort"
        if self._failed:
            finish = "error"
        elif self.finished:
            finish = "stop" if all(c.finish == "stop" for c in self.choices) else "length"
        first = None if self._first_token is None else self._first_token - self._began
        return RequestTimes(
            finish=finish,
            prompt_tokens=sum(map(len, self.spec.prompts)),
            first_token_seconds=first,
            total_seconds=self._clock() - self._began,
        )

    @property
    def finished(self) -> bool:
        return not self._open

    @property
    def wanted(self) -> list[Choice]:
        """Of each prompt's choices the `n` that are wanted: all in order, or of more than `n` the
        likeliest per token, best first."""
        spec, wanted = self.spec, list[Choice]()
        for start in range(0, len(self.choices), spec.fan_out):
            candidates = self.choices[start : start + spec.fan_out]
            if spec.fan_out > spec.n:
                candidates.sort(key=lambda choice: -choice.mean_logprob)
            wanted += candidates[: spec.n]
        return wanted

    def prompt_logprobs(self, number: int) -> Sequence[TokenLogprobs | None]:
        """Of prompt `number`, one entry per token, once the generation has finished."""
        found = self.choices[number * self.spec.fan_out].prompt_logprobs
        assert found is not None, "the engine sends them with its first output"
        return found

    @property
    def usage(self) -> Usage:
        """Counts so far; final once `finished`."""
        firsts = self.choices[:: self.spec.fan_out]
        return Usage(
            prompt_tokens=sum(map(len, self.spec.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            proposed=sum(choice.proposed for choice in self.choices),
            accepted=sum(choice.accepted for choice in self.choices),
            rounds=sum(choice.rounds for choice in self.choices),
            predicted=sum(choice.predicted for choice in self.choices),
            mispredicted=sum(choice.mispredicted for choice in self.choices),
            guessing=self.spec.guessing,
        )


def choice_seed(seed: int, i: int) -> int:
    """Seed of choice i, 64 bits: the seed itself for i = 0, else SplitMix64's i-th output."""
    if i == 0:
        return seed & MASK
    z = (seed + i * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
