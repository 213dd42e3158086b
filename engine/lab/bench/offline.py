"""The comparison on engines in this process: one for each arm, over one loaded pair.

The arms of a round run abreast: each in turn makes some two seconds' tokens, and its clock stands
still while others have theirs. So whatever makes a machine slower for some seconds does so for all
of them alike; a round that takes an arm no longer is one turn of each, in any order. Every engine
has seen nothing but its own arm's traffic, cell after cell, like that of a server in that mode; all
read the same weights, each has its own prefix cache and blocks of its own, in turns with the
others', in one KV cache. Where memory lies makes it faster or slower by up to 15 % for as long as
the process lives, so it must be alike for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.bench.options import Clock, Encode
from engine.lab.comparison.figures import Guesses, Reply, Run, first_waits
from engine.lab.comparison.grid import POOL, Arm, Lane, Request
from engine.lab.comparison.race import LONGEST
from engine.messages import Outputs, SamplingParams, Submit
from engine.model.kv_cache import KVCache
from engine.model.pair import Pair, shared_cache

LONGEST_PROMPT = 128  # tokens; of longer ones the end is taken
FIRST = 1  # tokens that are enough to see the first
# Seconds of a turn, about: so long that an arm is measured as it serves alone. Behind another one a
# round of 16 streams takes twice its time, and a hundred rounds until its data lies in the caches.
TURN = 2.0
_BLOCK = 16  # tokens


class Offline:
    """runs.Driver over a loaded pair. `reply`: tokens of the longest. Raises ConfigError for a
    prompt without tokens, EngineError where the engines cannot be built."""

    def __init__(
        self,
        pair: Pair,
        encode: Encode,
        *,
        arms: Sequence[Arm],
        concurrency: int,
        reply: int = LONGEST,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.exact = pair.target.exact
        self._encode = encode
        self._ids: dict[str, list[int]] = {}
        self._names = count()
        k = max((arm.k for arm in arms), default=0)
        text = _blocks_of_a_text(reply, k)
        shares = in_turns(len(arms), _blocks(concurrency, text), text)
        whole = _said(concurrency, sum(len(own) for own in shares))
        cache = shared_cache(EngineConfig.model_validate(whole), pair)
        self._order = Random(0)
        self._entrants = {
            arm: Entrant(pair, arm, _said(concurrency, len(own)), cache.part(own), clock)
            for arm, own in zip(arms, shares, strict=True)
        }

    def warm(self, prompts: Sequence[str]) -> None:
        """Into the prefix caches, planes of target and draft."""
        lanes = [[Request(prompt, 0.0, 0, 2)] for prompt in prompts]
        for arm, entrant in self._entrants.items():
            if arm.mode == "fixed":
                entrant.engine.set_speculation("fixed", 1)
            self._alone(entrant, lanes, salt="", whole=True)
            if arm.mode == "fixed":
                entrant.engine.set_speculation("fixed", arm.k)

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]:
        """Of the first request of each lane, all at once, under a salt of their own."""
        firsts = [[Request(r.prompt, r.temperature, r.seed, FIRST)] for r, *_ in lanes]
        salt = str(next(self._names))
        return first_waits(self._alone(self._entrants[arm], firsts, salt=salt, whole=True))

    def settle(self, arms: Sequence[Arm], lanes: Sequence[Lane]) -> None:
        """All of them: the blocks of an arm that has served more lie farther apart."""
        self.round(arms, lanes, lambda _: None)

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        return self._alone(self._entrants[arm], lanes, salt="")

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], notice: Callable[[Arm], None]
    ) -> dict[Arm, Run]:
        """All of them abreast, by tokens: they work on the same part of their texts. In any order,
        since whose turn came before tells what the caches hold."""
        sessions = {arm: self._session(self._entrants[arm], lanes, salt="") for arm in arms}
        left, upto = list(arms), len(lanes)
        while left:
            for arm in self._order.sample(left, len(left)):
                session = sessions[arm]
                session.play(upto)
                if session.is_over(whole=False):
                    session.clear()
                    left.remove(arm)
                    notice(arm)
            upto += max(1, round(TURN * min(session.rate for session in sessions.values())))
        return {arm: session.as_run() for arm, session in sessions.items()}

    def _alone(
        self, entrant: Entrant, lanes: Sequence[Lane], *, salt: str, whole: bool = False
    ) -> Run:
        """Until the first lane has nothing left (`whole`: until all have); the rest is aborted."""
        session = self._session(entrant, lanes, salt=salt)
        while not session.is_over(whole=whole):
            session.play(session.tokens + 1, whole=whole)
        session.clear()
        return session.as_run()

    def _session(self, entrant: Entrant, lanes: Sequence[Lane], *, salt: str) -> _Session:
        return _Session(entrant, lanes, self._submit, salt)

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


class Entrant:
    """The engine of one arm, and a clock of seconds that were its turn."""

    def __init__(
        self,
        pair: Pair,
        arm: Arm,
        said: dict[str, Any],
        cache: KVCache,
        clock: Clock,
    ) -> None:
        self._base = clock
        self._away, self._left = 0.0, 0.0
        self._is_playing = True
        config: dict[str, Any] = {**said, "target": {"path": pair.target.path}}
        if arm.mode != "auto":
            config["speculation"] = {"controller": {"kind": "fixed", "k": max(arm.k, 1)}}
        self.engine = Engine(
            EngineConfig.model_validate(config), pair=pair, cache=cache, clock=self.clock
        )
        assert arm.mode != "served", "of servers"
        assert arm.mode != "other", "of servers"
        if arm.mode != "auto":
            self.engine.set_speculation(arm.mode, arm.k)
        self.pause()

    def clock(self) -> float:
        return (self._base() if self._is_playing else self._left) - self._away

    def go_on(self) -> None:
        self._away += self._base() - self._left
        self._is_playing = True

    def pause(self) -> None:
        self._left = self._base()
        self._is_playing = False


class _Session:
    """One run on one engine. Seconds count from its construction."""

    def __init__(
        self,
        entrant: Entrant,
        lanes: Sequence[Lane],
        submit: Callable[[Request, str], Submit],
        salt: str,
    ) -> None:
        self.tokens = 0
        self._replies: list[Reply] = []
        self._guesses = Guesses()
        self._open: dict[str, Reply] = {}
        self._entrant, self._submit, self._salt = entrant, submit, salt
        self._left = [list(reversed(lane)) for lane in lanes]
        self._idle = 0
        self._began = entrant.clock()
        for lane in range(len(lanes)):
            self._next(lane)

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.tokens / max(self._entrant.clock() - self._began, 1e-9)

    def is_over(self, *, whole: bool) -> bool:
        return not self._open if whole else self._idle > 0

    def play(self, upto: int, *, whole: bool = False) -> None:
        """This arm's turn, until it has made so many tokens."""
        self._entrant.go_on()
        while self.tokens < upto and not self.is_over(whole=whole):
            self._step()
        self._entrant.pause()

    def clear(self) -> None:
        """Nothing of it is left running."""
        engine = self._entrant.engine
        engine.abort(self._open)
        while engine.has_work:
            engine.step()

    def as_run(self) -> Run:
        return Run(self._replies, self._guesses)

    def _step(self) -> None:
        outputs: Outputs = self._entrant.engine.step()
        now = self._entrant.clock() - self._began
        self._guesses.add(outputs.metrics)
        for output in outputs.items:
            if output.error is not None:
                raise ConfigError(f"the engine refused a request: {output.error}")
            reply = self._open[output.id]
            assert isinstance(reply.text, list)
            if output.tokens:
                self.tokens += len(output.tokens)
                reply.arrivals.append((now, len(output.tokens)))
                reply.text += output.tokens
            if output.finish is not None:
                del self._open[output.id]
                self._next(reply.lane)

    def _next(self, lane: int) -> None:
        if not self._left[lane]:
            self._idle += 1
            return
        submit = self._submit(self._left[lane].pop(), self._salt)
        reply = Reply(lane, self._entrant.clock() - self._began)
        self._replies.append(reply)
        self._open[submit.id] = reply
        self._entrant.engine.add(submit)


def _said(concurrency: int, num_blocks: int) -> dict[str, Any]:
    """Memory beyond what the blocks take is never touched."""
    cache = {"block_size": _BLOCK, "num_blocks": num_blocks, "cpu_memory_gib": 1e3}
    return {"schedule": {"max_sequences": concurrency}, "cache": cache}


def _blocks_of_a_text(reply: int, k: int) -> int:
    """The longest, with its prompt and guesses."""
    return -(-LONGEST_PROMPT // _BLOCK) + (reply + k) // _BLOCK + 2


def _blocks(concurrency: int, text: int) -> int:
    """Of one arm: for what runs, as much again for what stays, and every prompt."""
    return 2 * concurrency * text + 4 * POOL * -(-LONGEST_PROMPT // _BLOCK)


def in_turns(arms: int, least: int, run: int) -> list[list[int]]:
    """Blocks of each arm, at least so many, from one numbering: `run` of the first arm, `run` of
    the second, and so on, and over again. A text that fits a run lies in one piece, as alone."""
    runs = arms * -(-least // run)
    return [
        [
            block
            for first in range(arm, runs, arms)
            for block in range(first * run, (first + 1) * run)
        ]
        for arm in range(arms)
    ]
