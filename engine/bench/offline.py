"""The comparison on engines in this process: two of them over one loaded pair.

Off and every fixed K share an engine that is switched between runs. Auto has one of its own, whose
controller has seen nothing but its own traffic, cell after cell, like that of a server in the mode
auto: runs at a fixed K can neither teach it the texts nor leave it with stale estimates. Both read
the same weights; each has its own KV and prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from engine.comparison.arms import AUTO, Arm
from engine.comparison.grid import Lane, Request
from engine.comparison.runs import Guesses, Reply, Run, first_waits
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.messages import Outputs, SamplingParams, StepMetrics, Submit
from engine.pair import Pair

LONGEST_PROMPT = 128  # tokens; of longer ones the end is taken
FIRST = 1  # tokens that are enough to see the first

Encode = Callable[[str], list[int]]


class Offline:
    """runs.Driver over a loaded pair. Raises ConfigError for a prompt without tokens."""

    def __init__(
        self,
        pair: Pair,
        encode: Encode,
        *,
        arms: Sequence[Arm],
        concurrency: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.exact = pair.target.exact
        self._encode, self._clock = encode, clock
        self._ids: dict[str, list[int]] = {}
        self._names = count()
        k = max((arm.k for arm in arms), default=0)
        schedule = {"max_sequences": concurrency}
        fixed = {"kind": "fixed", "k": max(k, 1)}
        self._switched = _engine(
            pair, {"schedule": schedule, "speculation": {"controller": fixed}}, clock
        )
        self._engines = [self._switched]
        if AUTO in arms:
            self._auto = _engine(pair, {"schedule": schedule}, clock)
            self._engines.append(self._auto)

    def warm(self, prompts: Sequence[str]) -> None:
        """Into both prefix caches, planes of target and draft."""
        lanes = [[Request(prompt, 0.0, 0, 2)] for prompt in prompts]
        if self._switched.ready.k_max:
            self._switched.set_speculation("fixed", 1)
        for engine in self._engines:
            self._work(engine, lanes, salt="", whole=True)

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]:
        """Of the first request of each lane, all at once, under a salt of their own."""
        firsts = [[Request(r.prompt, r.temperature, r.seed, FIRST)] for r, *_ in lanes]
        run = self._work(self._engine_of(arm), firsts, salt=str(next(self._names)), whole=True)
        return first_waits(run)

    def settle(self, arm: Arm, lanes: Sequence[Lane]) -> None:
        self.run(arm, lanes)

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        return self._work(self._engine_of(arm), lanes, salt="")

    def _engine_of(self, arm: Arm) -> Engine:
        if arm == AUTO:
            return self._auto
        assert arm.mode != "served", "of servers"
        assert arm.mode != "other", "of servers"
        self._switched.set_speculation(arm.mode, arm.k)
        return self._switched

    def _work(
        self, engine: Engine, lanes: Sequence[Lane], *, salt: str, whole: bool = False
    ) -> Run:
        """Until the first lane has nothing left (`whole`: until all have); the rest is aborted."""
        session = _Session(engine, lanes, self._submit, self._clock, salt)
        while not session.is_over(whole=whole):
            session.step()
        engine.abort(session.open)
        while engine.has_work:
            engine.step()
        return Run(session.replies, session.guesses)

    def _submit(self, request: Request, salt: str) -> Submit:
        ids = self._ids.get(request.prompt)
        if ids is None:
            ids = self._ids[request.prompt] = self._encode(request.prompt)[-LONGEST_PROMPT:]
            if not ids:
                raise ConfigError("a prompt has no tokens for this model")
        params = SamplingParams(
            seed=request.seed,
            max_tokens=request.tokens,
            temperature=request.temperature,
            ignore_eos=True,
            cache_salt=salt,
        )
        return Submit(f"bench-{next(self._names)}", list(ids), params, 0.0)


class _Session:
    """One run on one engine. Seconds count from its construction."""

    def __init__(
        self,
        engine: Engine,
        lanes: Sequence[Lane],
        submit: Callable[[Request, str], Submit],
        clock: Callable[[], float],
        salt: str,
    ) -> None:
        self.replies: list[Reply] = []
        self.guesses = Guesses()
        self.open: dict[str, Reply] = {}
        self._engine, self._submit, self._clock, self._salt = engine, submit, clock, salt
        self._left = [list(reversed(lane)) for lane in lanes]
        self._idle = 0
        self._began = clock()
        for lane in range(len(lanes)):
            self._next(lane)

    def is_over(self, *, whole: bool) -> bool:
        return not self.open if whole else self._idle > 0

    def step(self) -> None:
        outputs: Outputs = self._engine.step()
        now = self._clock() - self._began
        _add(self.guesses, outputs.metrics)
        for output in outputs.items:
            if output.error is not None:
                raise ConfigError(f"the engine refused a request: {output.error}")
            reply = self.open[output.id]
            assert isinstance(reply.text, list)
            if output.tokens:
                reply.arrivals.append((now, len(output.tokens)))
                reply.text += output.tokens
            if output.finish is not None:
                del self.open[output.id]
                self._next(reply.lane)

    def _next(self, lane: int) -> None:
        if not self._left[lane]:
            self._idle += 1
            return
        submit = self._submit(self._left[lane].pop(), self._salt)
        reply = Reply(lane, self._clock() - self._began)
        self.replies.append(reply)
        self.open[submit.id] = reply
        self._engine.add(submit)


def _engine(pair: Pair, said: dict[str, Any], clock: Callable[[], float]) -> Engine:
    config = {**said, "target": {"path": pair.target.path}}
    return Engine(EngineConfig.model_validate(config), pair=pair, clock=clock)


def _add(guesses: Guesses, metrics: StepMetrics) -> None:
    for sums, more in (
        (guesses.proposed_at, metrics.proposed_at),
        (guesses.accepted_at, metrics.accepted_at),
        (guesses.k_counts, metrics.k_counts),
    ):
        sums.extend([0.0] * (len(more) - len(sums)))
        for i, amount in enumerate(more):
            sums[i] += amount
