"""Replicas in virtual time: the engine's own scheduler and block pool, with step times computed
from the number of rows. So prefix cache hits, evictions and queues are those of real engines, while
a run of minutes takes seconds and is deterministic.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from engine.config import ScheduleConfig
from engine.messages import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan

VOCAB = 50_000
BLOCKS = 4_000  # per replica, of 16 tokens each
STEP_SECONDS, ROW_SECONDS = 0.008, 0.0001

# (request body, loads) -> (replica, tokens that the request adds to its load)
Choose = Callable[[bytes, Mapping[str, int]], tuple[str, int]]


@dataclass
class Conversation:
    """`turns` questions; each prompt has all earlier questions and replies. Lengths in tokens."""

    start: float
    history: list[int]
    turns: int
    question: tuple[int, int]
    reply: tuple[int, int]
    pause: float
    rng: random.Random

    def ask(self) -> tuple[list[int], list[int]]:
        """Return the next prompt and its future reply."""
        self.turns -= 1
        self.history += words(self.rng, self.question)
        return list(self.history), words(self.rng, self.reply)


def words(rng: random.Random, length: tuple[int, int]) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(*length))]


@dataclass
class Request:
    """A running request."""

    seq: Sequence
    reply: list[int]
    conversation: Conversation
    arrival: float
    load: int


class ModelReplica:
    """`scale`: it has the memory and speed of this many replicas."""

    def __init__(self, scale: int = 1) -> None:
        pool = BlockPool(BLOCKS * scale, 16, prefix_caching=True)
        config = ScheduleConfig(max_step_tokens=512 * scale, max_sequences=32 * scale)
        self.scheduler = Scheduler(config, pool, max_model_len=100_000)
        self.open: dict[str, Request] = {}
        self.stepping = False
        self.num_rows = 0
        self._scale = scale

    def plan(self) -> tuple[StepPlan, float]:
        plan = self.scheduler.schedule(lambda seq: 0)
        num_rows = sum(chunk.length + chunk.k for chunk in plan.chunks)
        self.num_rows += num_rows
        return plan, STEP_SECONDS + ROW_SECONDS * num_rows / self._scale

    def commit(self, plan: StepPlan) -> Iterable[Request]:
        """Finish a step; yield the requests that got a token."""
        for chunk in plan.chunks:
            request = self.open[chunk.seq.id]
            tokens = [request.reply[chunk.seq.num_output]] if chunk.samples else []
            self.scheduler.commit(chunk, tokens, 0)
            if tokens:
                yield request


@dataclass
class Played:
    """Results. `computed` and `served`: tokens by replica; `served` includes cached prefixes."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    asked: int = 0
    ended: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)  # seconds to the first token
    choices: list[float] = field(default_factory=list)  # seconds of real time per choice

    @property
    def hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class World:
    """The simulation. `replicas` may change while it runs; a removed one finishes its requests."""

    def __init__(self, replicas: Mapping[str, ModelReplica], choose: Choose) -> None:
        self.replicas = dict(replicas)
        self.played = Played()
        self._choose = choose
        self._loads = Counter[str]()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, moment: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), do))

    def run(self, conversations: Iterable[Conversation]) -> Played:
        for conversation in conversations:
            self.at(conversation.start, partial(self._ask, conversation))
        known = dict(self.replicas)
        while self._events:
            now, _, do = heapq.heappop(self._events)
            do(now)
            known |= self.replicas
        self.played.computed = {name: replica.num_rows for name, replica in known.items()}
        return self.played

    def _ask(self, conversation: Conversation, now: float) -> None:
        prompt, reply = conversation.ask()
        text = "".join(f"{token:04x}" for token in prompt)
        fields = {"messages": [{"role": "user", "content": text}], "max_tokens": len(reply)}
        body = json.dumps(fields).encode()
        began = time.perf_counter()
        name, load = self._choose(body, {name: self._loads[name] for name in self.replicas})
        self.played.choices.append(time.perf_counter() - began)
        number = self.played.asked = self.played.asked + 1
        params = SamplingParams(seed=0, max_tokens=len(reply))
        seq = Sequence(str(number), params, prompt, len(prompt), number=number)
        replica = self.replicas[name]
        replica.open[seq.id] = Request(seq, reply, conversation, now, load)
        replica.scheduler.add(seq)
        self._loads[name] += load
        self.played.served[name] += len(prompt) + len(reply)
        if not replica.stepping:
            self._step(now, name, replica)

    def _step(self, now: float, name: str, replica: ModelReplica) -> None:
        replica.stepping = bool(replica.open)
        if replica.stepping:
            plan, seconds = replica.plan()
            self.at(now + seconds, lambda now: self._commit(now, name, replica, plan))

    def _commit(self, now: float, name: str, replica: ModelReplica, plan: StepPlan) -> None:
        for request in replica.commit(plan):
            if request.seq.num_output == 1:
                self.played.waits.append(now - request.arrival)
            if replica.scheduler.room(request.seq) == 0:
                self._end(now, name, replica, request)
        self._step(now, name, replica)

    def _end(self, now: float, name: str, replica: ModelReplica, request: Request) -> None:
        replica.scheduler.finish(request.seq, "length")
        del replica.open[request.seq.id]
        self._loads[name] -= request.load
        played, conversation = self.played, request.conversation
        played.prompt_tokens += request.seq.num_prompt
        played.cached_tokens += request.seq.cached_tokens or 0
        played.ended += request.seq.tokens[request.seq.num_prompt :] == request.reply
        conversation.history += request.reply
        if conversation.turns:
            pause = conversation.rng.expovariate(1 / conversation.pause)
            self.at(now + pause, partial(self._ask, conversation))
