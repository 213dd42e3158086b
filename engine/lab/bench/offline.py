"""Compare modes on engines in this process: one engine per mode, over one loaded pair. Optionally
beside transformers' own generation.

The arms of a round take turns of about two seconds, and an arm's clock stops during other arms'
turns, so that a temporary slowdown of the machine affects all arms alike. Each engine sees only its
own arm's traffic, like a server in that mode. All engines share the weights and one KV cache, where
each has its own prefix cache and its own blocks, interleaved with the others': the placement of
memory changes speed by up to 15 % for the lifetime of a process, so it must be alike for all.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import get_args

from engine.config import AnyProposer, Companion, EngineConfig, SpeculationConfig
from engine.control.controller import KController
from engine.control.modes import build_controller
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.comparison.figures import Reply, Run
from engine.lab.comparison.race import LONGEST
from engine.lab.comparison.workload import Arm, Lane, Request
from engine.lab.replay.variants import VARIANTS
from engine.messages import SamplingParams, Submit
from engine.model.kv_cache import KVCache
from engine.model.pair import Pair, load_pair, shared_cache

Clock = Callable[[], float]
Encode = Callable[[str], list[int]]

# Arms that are auto with a single proposer: a configured kind, or a free one.
KINDS = tuple(get_args(kind.model_fields["kind"].annotation)[0] for kind in get_args(AnyProposer))
PROPOSERS = (*(kind for kind in KINDS if kind != "none"), "prediction")
# auto with all proposers that need no other weights; with trees of second-best tokens of the draft
ALL, TREE = "all", "tree"
REMEMBERED = 1 << 16  # tokens of earlier replies kept for `suffix`
# Seconds of a turn, about: long enough that an arm runs as if alone. After another arm's turn, a
# round of 16 streams takes twice as long, and caches need a hundred rounds to fill.
TURN = 2.0
BLOCK = 16  # tokens


class TurnClock:
    """A clock that counts the seconds of its own turns, between `start` and `stop`."""

    def __init__(self, base: Clock = time.perf_counter) -> None:
        self._base = base
        self._away = self._stopped = base()
        self._runs = False

    def __call__(self) -> float:
        return (self._base() if self._runs else self._stopped) - self._away

    def start(self) -> None:
        self._away += self._base() - self._stopped
        self._runs = True

    def stop(self) -> None:
        self._stopped, self._runs = self._base(), False

    def rewind(self, reading: float) -> None:
        """Set the clock back to an earlier reading."""
        self._away += self() - reading


@dataclass(kw_only=True)
class Session(ABC):
    """One run of one arm, until its first lane runs out of requests (`whole`: until all do).
    Seconds count from its start; `clock` runs during its turns only."""

    clock: TurnClock
    lanes: Sequence[Sequence[Submit]]
    whole: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        self.run, self.left = Run(), [list(reversed(lane)) for lane in self.lanes]
        self._began = self.clock()

    @property
    def seconds(self) -> float:
        return self.clock() - self._began

    @property
    @abstractmethod
    def is_over(self) -> bool: ...

    @abstractmethod
    def step(self) -> None:
        """Do the smallest unit of work."""

    def play(self, upto: float) -> None:
        """Run a turn, until `upto` tokens are generated in all or the run is over."""
        self.clock.start()
        while self.tokens < upto and not self.is_over:
            self.step()
        self.clock.stop()

    def begin(self, lane: int) -> tuple[Submit, Reply]:
        """Start the next request of a lane."""
        submit = self.left[lane].pop()
        self.run.replies.append(Reply(lane, submit.params.seed, self.seconds))
        return submit, self.run.replies[-1]

    def deliver(self, reply: Reply, tokens: int, now: float) -> None:
        """Record tokens of a reply. `now`: seconds since the start of the run."""
        self.tokens += tokens
        reply.arrivals.append((now, tokens))


@dataclass(kw_only=True)
class EngineSession(Session):
    """A run on an engine that uses the same clock."""

    engine: Engine

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open: dict[str, Reply] = {}
        for lane in range(len(self.lanes)):
            self._next(lane)

    @property
    def is_over(self) -> bool:
        return not self._open if self.whole else len(self._open) < len(self.left)

    def step(self) -> None:
        """Run an engine step. Raises ConfigError if the engine refuses a request."""
        outputs = self.engine.step()
        now = self.seconds
        self.run.steps.add(outputs.metrics)
        for output in outputs.items:
            if output.error is not None:
                raise ConfigError(f"the engine refused a request: {output.error}")
            reply = self._open[output.id]
            assert isinstance(reply.text, list)
            if output.tokens:
                self.deliver(reply, len(output.tokens), now)
                reply.text += output.tokens
            if output.finish is not None:
                del self._open[output.id]
                self._next(reply.lane)

    def close(self) -> None:
        """Abort all requests that still run."""
        self.engine.abort(self._open)
        while self.engine.has_work:
            self.engine.step()

    def _next(self, lane: int) -> None:
        if self.left[lane]:
            submit, reply = self.begin(lane)
            self._open[submit.id] = reply
            self.engine.add(submit)


OtherArm = Callable[..., Session]  # takes the fields of Session


class Offline:
    """A race.Player over a pair loaded for `config`. `others`: session factories of arms without an
    engine; `settings`: speculation settings of arms that differ from `config`. `prompts`: number of
    prompts of `longest_prompt` tokens that are as long as all prompts together; only the last
    `longest_prompt` tokens of each are used. `reply`: tokens of the longest reply. Raises
    EngineError if the engines cannot be built."""

    def __init__(
        self,
        config: EngineConfig,
        pair: Pair,
        encode: Encode,
        arms: Sequence[Arm],
        *,
        concurrency: int,
        prompts: int,
        reply: int = LONGEST,
        clock: Clock = time.perf_counter,
        others: Mapping[Arm, OtherArm] | None = None,
        settings: Mapping[Arm, SpeculationConfig] | None = None,
        longest_prompt: int = 128,
    ) -> None:
        self.longest_prompt = longest_prompt
        self.exact = pair.target.exact
        self._encode, self._clock, self._others = encode, clock, others or {}
        self._ids: dict[str, list[int]] = {}
        self._names, self._order = count(), Random(0)
        modes = [arm for arm in arms if arm.is_mode]
        prompt = -(-longest_prompt // BLOCK)
        text = prompt + (reply + max(arm.k for arm in modes)) // BLOCK + 2
        # Blocks for the running texts, as many for the cached ones, and for every prompt.
        shares = in_turns(len(modes), 2 * concurrency * text + prompts * prompt, text)
        self.engines: dict[Arm, tuple[Engine, TurnClock]] = {}
        caches: dict[AnyProposer, tuple[Pair, KVCache]] = {}  # drafts differ in shape
        for arm, own in zip(modes, shares, strict=True):
            arm_config = _config(config, arm, len(own), concurrency, (settings or {}).get(arm))
            if (proposer := arm_config.speculation.proposer) not in caches:
                given = proposer == config.speculation.proposer or arm.label == TREE
                models = pair if given else load_pair(arm_config, pair.target)
                whole = _config(arm_config, arm, sum(map(len, shares)), concurrency)
                caches[proposer] = models, shared_cache(whole, models)
                if self.engines:  # all share the target's KV memory
                    first = next(iter(caches.values()))[1]
                    caches[proposer][1].planes["target"] = first.planes["target"]
            models, cache = caches[proposer]
            self.engines[arm] = _engine_of(arm, arm_config, models, cache.part(own), clock)

    def warm(self, prompts: Sequence[str]) -> None:
        """Put prompts into all prefix caches, for target and draft."""
        for arm, (engine, _) in self.engines.items():
            if arm.mode == "fixed":
                engine.set_speculation("fixed", 1)
            lanes = [[Request(prompt, 0.0, 0, 2)] for prompt in prompts]
            self.begin(arm, lanes, whole=True).play(math.inf)
            _set_mode(engine, arm)

    def round(
        self,
        arms: Sequence[Arm],
        lanes: Sequence[Lane],
        *,
        cold: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[Arm, Run]:
        """Run the arms in turns, each up to the same number of tokens, so that all work on the same
        part of their texts. The order of turns is random, since the previous turn decides what the
        caches hold. If `stop` is true after a turn, return what there is."""
        salt = str(next(self._names)) if cold else ""
        sessions = {arm: self.begin(arm, lanes, salt=salt, whole=cold) for arm in arms}
        left, upto = list(arms), float(len(lanes))
        while left and not stop():
            for arm in self._order.sample(left, len(left)):
                if stop():
                    break
                session = sessions[arm]
                session.play(upto)
                if session.is_over:
                    left.remove(arm)
            rates = (each.tokens / max(each.seconds, 1e-9) for each in sessions.values())
            upto += max(1.0, TURN * min(rates))
        for session in sessions.values():
            if isinstance(session, EngineSession):
                session.close()
        return {arm: session.run for arm, session in sessions.items()}

    def begin(
        self, arm: Arm, lanes: Sequence[Lane], *, salt: str = "", whole: bool = False
    ) -> Session:
        """Start a run of an arm. Raises ConfigError for a prompt without tokens."""
        submits = [[self._submit(request, salt) for request in lane] for lane in lanes]
        if arm in self._others:
            return self._others[arm](clock=TurnClock(self._clock), lanes=submits, whole=whole)
        engine, clock = self.engines[arm]
        return EngineSession(engine=engine, clock=clock, lanes=submits, whole=whole)

    def _submit(self, request: Request, salt: str) -> Submit:
        if (ids := self._ids.get(request.prompt)) is None:
            ids = self._ids[request.prompt] = self._encode(request.prompt)[-self.longest_prompt :]
        if not ids:
            raise ConfigError("a prompt has no tokens for this model")
        params = SamplingParams(
            seed=request.seed,
            max_tokens=request.tokens,
            temperature=request.temperature,
            ignore_eos=not request.ends,
            cache_salt=salt,
            prediction=tuple(self._encode(request.prediction)) if request.prediction else (),
        )
        return Submit(f"bench-{next(self._names)}", list(ids), params, 0.0)


def _controller(arm: Arm) -> Callable[..., KController]:
    """Return the arm's controller factory for Engine."""
    if (variant := VARIANTS.get(arm.label)) is None:
        return build_controller
    return lambda config, *, stops=True, trees=False: variant(config.k_max, stops=stops)


def _engine_of(
    arm: Arm, config: EngineConfig, pair: Pair, cache: KVCache, clock: Clock
) -> tuple[Engine, TurnClock]:
    """Return the arm's engine in its mode, and its clock, which ran while its steps were timed."""
    watch = TurnClock(clock)
    watch.start()
    engine = Engine(config, pair=pair, cache=cache, clock=watch, controller=_controller(arm))
    watch.stop()
    _set_mode(engine, arm)
    return engine, watch


def _set_mode(engine: Engine, arm: Arm) -> None:
    assert arm.mode != "served"
    assert arm.mode != "other"
    engine.set_speculation(arm.mode, arm.k)


def _config(
    config: EngineConfig,
    arm: Arm,
    num_blocks: int,
    concurrency: int,
    speculation: SpeculationConfig | None = None,
) -> EngineConfig:
    """Return an arm's config. `speculation`: the arm's own settings. The large memory limit is
    harmless, because only the blocks are allocated."""
    values = config.model_dump()
    if speculation is not None:
        values["speculation"] = speculation.model_dump()
    values["cache"].update(block_size=BLOCK, num_blocks=num_blocks, cpu_memory_gib=1e3)
    values["schedule"]["max_sequences"] = concurrency
    if arm.mode != "auto":
        values["speculation"]["controller"] = {"kind": "fixed", "k": max(arm.k, 1)}
    if arm.label == TREE:
        values["speculation"]["proposer"]["branches"] = 4
    if arm.label == ALL:
        values["speculation"].update(companions=get_args(Companion), remembered_tokens=REMEMBERED)
    if arm.label in KINDS:
        if arm.label != values["speculation"]["proposer"]["kind"]:
            values["speculation"]["proposer"] = {"kind": arm.label}
        values["speculation"].update(companions=[], remembered_tokens=REMEMBERED)
    elif arm.label == "prediction":
        values["speculation"].update(proposer={"kind": "ngram"}, companions=[arm.label])
    return EngineConfig.model_validate(values)


def in_turns(arms: int, least: int, run: int) -> list[list[int]]:
    """Return each arm's block numbers, at least `least`: `run` blocks for the first arm, `run` for
    the second, and so on in turns. A text that fits in a run is contiguous, as without others."""
    runs = arms * -(-least // run)
    return [
        [first * run + at for first in range(arm, runs, arms) for at in range(run)]
        for arm in range(arms)
    ]
