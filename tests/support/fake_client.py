"""FakeClient: an EngineClient without an engine, for tests of everything above the wire.

Tokens are a function of (prompt, seed, position), or given by the test's `script`. Uses the real
`Stream`, so merging and the one-terminal-event rule are the real ones. Needs a running event loop.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Iterable, Sequence

from engine.errors import EngineLost
from engine.messages import (
    TARGET,
    FinishReason,
    Output,
    Ready,
    Submit,
    TokenLogprobs,
)
from server.engine.client import EngineClient
from server.engine.lifecycle import EngineState
from server.engine.mailbox import Stream

Script = Callable[[Submit, int], int]  # (request, output position) -> token id

LOWERCASE = range(ord("a"), ord("z") + 1)


def make_ready(**changes: object) -> Ready:
    """The Ready of a small engine: 256 bytes and two special tokens, 512 tokens of context."""
    fields: dict[str, object] = {
        "pid": 1,
        "target": "fake-target",
        "max_model_len": 512,
        "vocab_size": 258,
        "eos_ids": [257],
        "num_blocks": 64,
        "block_size": 16,
        "dtype": "float32",
        "device": "cpu",
        "attention": "sdpa",
        "proposer": "draft_model",
        "controller": "fixed",
        "k_max": 4,
        "proposers": ("prediction", "ngram", "draft_model"),
        "default_proposers": ("prediction", "draft_model"),
    }
    return Ready(**{**fields, **changes})  # type: ignore[arg-type]


def hashed_script(alphabet: Sequence[int] = LOWERCASE) -> Script:
    """A token of `alphabet` by hash of (prompt, seed, position); seed 0 at temperature 0."""

    def token(submit: Submit, position: int) -> int:
        seed = submit.params.seed if submit.params.temperature > 0 else 0
        key = repr((submit.prompt, seed, position)).encode()
        return alphabet[zlib.crc32(key) % len(alphabet)]

    return token


def listed_script(tokens: Sequence[int], *, then: int) -> Script:
    """Exactly `tokens`, then `then` for ever (normally an EOS id)."""
    return lambda submit, position: tokens[position] if position < len(tokens) else then


class FakeClient(EngineClient):
    """Supports max_tokens, min_tokens, stop_token_ids, EOS, ignore_eos, logprobs, prompt_logprobs.

    `gate`: if given, one step runs each time the test releases it (`gate.release()`).
    `refusal`: if given, every request ends with finish `error` and this sentence; `bad_request`:
    whether the request is at fault.
    `score`: a token's log-probability; by default log(1/2) for the chosen token.
    `submitted`, `aborted` record the calls. `die(sentence)` fails every open stream.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        ready: Ready | None = None,
        state: EngineState = "ready",
        tokens_per_step: int = 1,
        gate: asyncio.Semaphore | None = None,
        refusal: str | None = None,
        bad_request: bool = False,
        score: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__()
        self.state = state
        self.ready = ready if ready is not None else make_ready()
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.steps = 0
        self._streams: dict[str, Stream] = {}
        self._script = script if script is not None else hashed_script()
        self._tokens_per_step = tokens_per_step
        self._gate = gate
        self._refusal = refusal
        self._bad_request = bad_request
        self._score = score
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def inflight(self) -> int:
        return len(self._streams)

    def submit(self, submit: Submit) -> Stream:
        if self.state != "ready":
            raise EngineLost(f"the engine is {self.state}")
        assert submit.id not in self._streams, f"request id {submit.id} is used twice"
        stream = Stream(submit)
        self.submitted.append(submit)
        self._streams[submit.id] = stream
        self._tasks[submit.id] = asyncio.create_task(self._run(submit, stream))
        return stream

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            stream = self._streams.pop(id, None)
            if stream is not None:
                self.aborted.append(id)
                self._tasks.pop(id).cancel()
                stream.put(Output(id=id, finish="abort"))

    def die(self, sentence: str = "the engine process died") -> None:
        """Behave as if the engine process was killed."""
        self.state = "lost"
        for id, stream in list(self._streams.items()):
            self._tasks.pop(id).cancel()
            stream.fail(sentence)
        self._streams.clear()

    async def _run(self, submit: Submit, stream: Stream) -> None:
        position, rounds = len(submit.begun.tokens), 0
        finish: FinishReason | None = None
        while finish is None:
            await self._turn()
            if self._refusal is not None:
                stream.put(
                    Output(
                        id=submit.id,
                        finish="error",
                        error=self._refusal,
                        bad_request=self._bad_request,
                    )
                )
                break
            tokens, finish = self._step(submit, position)
            position += len(tokens)
            rounds += 1
            first = rounds == 1 and not submit.begun.tokens
            stop = [*submit.begun.tokens, *tokens][-1] if finish == "stop" else None
            want = submit.params.prompt_logprobs
            stream.put(
                Output(
                    id=submit.id,
                    tokens=tokens,
                    logprobs=self._logprobs(tokens, submit.params.logprobs),
                    prompt_logprobs=self._prompt_logprobs(submit, want) if first else None,
                    finish=finish,
                    stop_token=stop,
                    cached_tokens=0 if first else None,
                    rounds=rounds,
                    proposed=rounds * (self._tokens_per_step - 1),
                    accepted=max(position - len(submit.begun.tokens) - rounds, 0),
                    predicted=rounds * (self._tokens_per_step - 1)
                    if submit.params.prediction
                    else 0,
                    source=self._source(submit),
                    sources=self._sources(submit, tokens),
                )
            )
        self._streams.pop(submit.id, None)
        self._tasks.pop(submit.id, None)

    async def _turn(self) -> None:
        self.steps += 1
        if self._gate is not None:
            await self._gate.acquire()
        else:
            await asyncio.sleep(0)

    def _step(self, submit: Submit, position: int) -> tuple[list[int], FinishReason | None]:
        assert self.ready is not None
        params = submit.params
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.ready.eos_ids)
        limit = min(params.max_tokens, self.ready.max_model_len - len(submit.prompt))
        tokens: list[int] = []
        if submit.begun.tokens[position - 1 :] and submit.begun.tokens[-1] in stops:
            return [], "stop"
        if position >= limit:
            return [], "length"
        while len(tokens) < self._tokens_per_step:
            token = self._script(submit, position + len(tokens))
            tokens.append(token)
            count = position + len(tokens)
            if token in stops and count > params.min_tokens:
                return tokens, "stop"
            if count >= limit:
                return tokens, "length"
        return tokens, None

    def _source(self, submit: Submit) -> str:
        if self._tokens_per_step == 1:
            return ""
        return "prediction" if submit.params.prediction else "draft_model"

    def _sources(self, submit: Submit, tokens: list[int]) -> list[tuple[str, int]] | None:
        """The sources of the tokens: all but the last of a step were proposed."""
        params = submit.params
        if not (params.provenance or params.prediction):
            return None
        source = self._source(submit)
        accepted = min(len(tokens), self._tokens_per_step - 1)
        runs = [(source, accepted), (TARGET, len(tokens) - accepted)]
        return [(name, count) for name, count in runs if count]

    def _logprobs(self, tokens: list[int], count: int | None) -> list[TokenLogprobs] | None:
        if count is None:
            return None
        return [self._one_logprob(token, count) for token in tokens]

    def _prompt_logprobs(
        self, submit: Submit, count: int | None
    ) -> list[TokenLogprobs | None] | None:
        if count is None:
            return None
        return [None, *(self._one_logprob(token, count) for token in submit.prompt[1:])]

    def _one_logprob(self, token: int, count: int) -> TokenLogprobs:
        """The token has probability 1/2, and each following id half of what remains."""
        assert self.ready is not None
        ids = [(token + offset) % self.ready.vocab_size for offset in range(max(count, 1))]
        ranked = [(id, math.log(0.5) * (rank + 1)) for rank, id in enumerate(ids)]
        logprob = ranked[0][1] if self._score is None else self._score(token)
        return TokenLogprobs(token=token, logprob=logprob, top=ranked[:count])
