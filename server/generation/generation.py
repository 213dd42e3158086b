"""Generation: the reply to one API call, from its engine requests, n for each of its prompts.

Guarantees: every engine request ends exactly once: by its finish, by a stop string or by `close`,
which is synchronous so that it can run during cancellation. Text never splits a character and never
contains part of a stop string. HTTP formats are in `server.api`, scheduling in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from engine.messages import Output, TokenLogprobs
from server.engine.admission import Charge
from server.engine.client import EngineClient
from server.engine.mailbox import Stream
from server.errors import DeadlineExceeded, GenerationFailed, NotReady
from server.generation.choice import Choice, Delta
from server.generation.generation_spec import GenerationSpec
from server.generation.progress import ReplyProgress
from server.generation.usage import Usage, total
from server.observe.exchange import EXCHANGE, Ended
from server.observe.metrics import Metrics
from server.observe.metrics_table import Finish
from server.text.tokenizer import Tokenizer


class Generation:
    """Reads `streams`, the mailboxes of all choices, which are submitted as they are taken
    (`GenerationSpec.submit`): all of them, or none and the error is raised. Call `read` until
    `finished`; `close` ends what is open, and must be called."""

    def __init__(
        self,
        spec: GenerationSpec,
        streams: Iterable[Stream],
        *,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        charge: Charge | None = None,
        progress: ReplyProgress | None = None,
    ) -> None:
        self.spec = spec
        self.choices: list[Choice] = []
        self._streams: list[Stream] = []
        self._client = client
        self._metrics = metrics
        self._charge = charge
        self._progress = progress
        self._held = list[Delta]()  # taken at the deadline
        self._began = time.monotonic()
        self._first_token: float | None = None  # time of the first token of any choice
        self._queued: float | None = None  # seconds until the first step that ran any choice
        self._exchange = EXCHANGE.get()
        self._arrivals: dict[int, float] = {}  # by choice: time of its last tokens
        self._failure: Exception | None = None  # raised by `read` after earlier deltas
        self._ended = False
        self._wake = asyncio.Event()
        later, seconds = asyncio.get_running_loop().call_later, spec.seconds
        left = (seconds or 0.0) - (0.0 if progress is None else progress.spent)
        self._deadline = None if seconds is None else later(left, self._expire, seconds)
        try:
            for index, stream in enumerate(streams):
                stream.wake = self._wake
                self._streams.append(stream)
                self.choices.append(Choice(index, stream, spec=spec, tokenizer=tokenizer))
        except Exception as error:
            self._failure = error
            self.close()
            raise

    async def read(self) -> list[Delta]:
        """Wait until something has arrived, and return the deltas since the last call, perhaps
        none; each choice's last one has its finish. Outputs that arrive while nobody reads are
        merged in the mailboxes.

        Raises EngineLost if the engine dies, GenerationFailed if it refuses a sequence, but only
        after all that arrived before was returned. Both end the whole call.
        """
        await self._wake.wait()
        return self._take()

    def _take(self) -> list[Delta]:
        self._wake.clear()
        deltas, self._held = self._held, []
        try:
            if self._failure is not None:
                raise self._failure
            for choice in self.choices:
                if choice.finish is not None or (output := choice.stream.take()) is None:
                    continue
                if output.tokens:
                    self._observe(choice.index, output)
                if (delta := choice.feed(output)) is not None:
                    deltas.append(delta)
                if self._progress is not None and choice.index == 0:
                    self._progress.tokens += output.tokens
                if choice.finish is not None and output.finish is None:
                    self._client.abort([choice.stream.id])  # a stop string, unknown to the engine
        except Exception as error:
            self._failure = error
            if isinstance(error, GenerationFailed) and error.bad_request:
                error.param = self.spec.grammar_param
            if not deltas:
                raise
            self._wake.set()
        return deltas

    def _expire(self, seconds: float) -> None:
        """Fail at the deadline. What arrived in time is still returned."""
        with suppress(Exception):  # `read` raises it
            self._held = self._take()
        if self._failure is None and any(choice.finish is None for choice in self.choices):
            sentence = f"the request was not finished within the {seconds:g} s that it may take"
            self._failure = DeadlineExceeded(sentence)
            self._client.abort([stream.id for stream in self._streams])
        self._wake.set()

    def close(self) -> None:
        """Abort all open choices in the engine. May be called repeatedly, and during
        cancellation."""
        self._client.abort([stream.id for stream in self._streams])
        if self._ended:
            return
        self._ended = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._charge is not None:
            self._charge.end()
        if isinstance(self._failure, NotReady):
            return  # raised while it was submitted, and counted as a refusal
        usage = self.usage
        ended = Ended(
            id=self.spec.id if self._progress is None else self._progress.id,
            finish=self._finish(),
            began=self._began,
            total=time.monotonic() - self._began,
            prompt_tokens=usage.prompt_tokens,
            reply_tokens=usage.completion_tokens,
            rounds=usage.rounds,
            proposed=usage.proposed,
            accepted=usage.accepted,
            queued=self._queued,
            first_token=None if self._first_token is None else self._first_token - self._began,
        )
        self._metrics.observe_request(ended)
        if self._exchange is not None:
            self._exchange.ended = ended

    def _finish(self) -> Finish:
        match self._failure:
            case None if not self.finished:
                return "abort"
            case None:
                pass
            case DeadlineExceeded():
                return "timeout"
            case GenerationFailed(bad_request=True):
                return "refused"
            case _:
                return "error"
        return "stop" if all(choice.finish == "stop" for choice in self.choices) else "length"

    def _observe(self, index: int, output: Output) -> None:
        """Record the arrival of a choice's tokens."""
        if self._charge is not None:
            self._charge.tokens(len(output.tokens))
        now = time.monotonic()
        before = self._arrivals.get(index)
        if before is not None:
            self._metrics.observe_tokens(len(output.tokens), gap_seconds=now - before)
        else:
            if output.queued is not None:
                self._metrics.observe_queue(output.queued)
            if self._first_token is None:
                self._first_token, self._queued = now, output.queued
        self._arrivals[index] = now

    @property
    def finished(self) -> bool:
        """Whether all choices have ended, and `read` has returned all of their deltas."""
        return not self._held and all(choice.finish is not None for choice in self.choices)

    @property
    def wanted(self) -> list[Choice]:
        """Return `n` choices per prompt: all in order, or if there are more than `n`, those of the
        highest log-probability per token, best first."""
        spec, wanted = self.spec, list[Choice]()
        for start in range(0, len(self.choices), spec.fan_out):
            candidates = self.choices[start : start + spec.fan_out]
            if spec.fan_out > spec.n:
                candidates.sort(key=lambda choice: -choice.mean_logprob)
            wanted += candidates[: spec.n]
        return wanted

    def prompt_logprobs(self, number: int) -> Sequence[TokenLogprobs | None]:
        """Return those of prompt `number`, one per token, once the generation has finished."""
        entries = self.choices[number * self.spec.fan_out].prompt_logprobs
        assert entries is not None, "the engine sends them with its first output"
        return entries

    @property
    def usage(self) -> Usage:
        """Return the counts so far; final once `finished`."""
        return total(
            [choice.usage for choice in self.choices],
            prompt_tokens=self.spec.prompt_tokens,
            drafting=self.spec.drafting,
            per=self.spec.fan_out,
        )
