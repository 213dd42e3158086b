"""The engine's half of `foredraft evaluate`: runs batches of sequences under any mode, in one
engine, and says what came and how long it took. What to run and what it means is decided in
`server/lab/evaluate`, whose child this is: `python -m engine.lab.evaluate`, commands on
stdin, answers on stdout (`engine.lab.evaluate_messages`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import IO, Protocol

import msgspec

from engine.child.parent import die_with_parent
from engine.child.threads import VARIABLES, limit_threads
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.lab.evaluate_messages import (
    Batch,
    Command,
    Event,
    Mode,
    ModeName,
    Ran,
    Start,
    Sums,
    Weigh,
    Weighed,
    receive,
    send,
)
from engine.messages import (
    MAX_LOGPROBS,
    Fatal,
    Outputs,
    Ready,
    Speculation,
    StepMetrics,
    Submit,
    TokenLogprobs,
)

OFF = Mode("off")


class SwitchingEngine(Protocol):
    """What is needed of engine.core.Engine."""

    ready: Ready

    @property
    def has_work(self) -> bool: ...

    def add(self, submit: Submit) -> None: ...

    def step(self) -> Outputs: ...

    def set_speculation(self, mode: ModeName, k: int = 0) -> None: ...


class Timer:
    """A clock in seconds: of the wall, or with `cpu_time` of the processor for this process."""

    def __init__(self) -> None:
        self.cpu_time = False

    def __call__(self) -> float:
        return time.process_time() if self.cpu_time else time.perf_counter()


class Runner:
    """One engine, one batch at a time. Replies are those that the server would give: the mode says
    who guesses and nothing else."""

    def __init__(self, engine: SwitchingEngine, *, clock: Timer | None = None) -> None:
        self.ready = engine.ready
        self._engine = engine
        self._clock = clock or Timer()
        self._count = 0

    def answer(self, command: Command) -> Event:
        match command:
            case Batch():
                return self.run(command)
            case Weigh():
                return self.weigh(command)
        return Fatal("this engine has started already")

    def run(self, batch: Batch) -> Ran:
        """All sequences of the batch, to their ends."""
        self._engine.set_speculation(batch.mode.name, batch.mode.k)
        waiting = [self._submit(submit, batch.mode, i) for i, submit in enumerate(batch.submits)]
        places = {submit.id: i for i, submit in enumerate(waiting)}
        ran = Ran([[] for _ in waiting], 0.0, Sums(), {})
        waiting.reverse()
        running = 0
        gc.collect()  # not in the middle of what is timed
        started = self._clock()
        while waiting or self._engine.has_work:
            while waiting and running < batch.concurrency:
                self._engine.add(waiting.pop())
                running += 1
            outputs = self._engine.step()
            _add_step(ran.sums, outputs.metrics, full=min(batch.concurrency, len(places)))
            for output in outputs.items:
                ran.texts[places[output.id]] += output.tokens
                if output.finish is not None:
                    running -= 1
                if output.finish == "error":
                    ran.errors[places[output.id]] = output.error or "the engine refused it"
        seconds = self._clock() - started
        return msgspec.structs.replace(ran, seconds=seconds, cpu_time=self._clock.cpu_time)

    def weigh(self, command: Weigh) -> Weighed:
        """Decodes plainly up to the token in question and looks at it."""
        submit, wanted = command.submit, command.at + 1
        params = msgspec.structs.replace(
            submit.params,
            max_tokens=max(wanted, submit.params.min_tokens),
            logprobs=min(MAX_LOGPROBS, self.ready.vocab_size),
        )
        self._engine.set_speculation("off", 0)
        one = self._submit(msgspec.structs.replace(submit, params=params), OFF, 0)
        self._engine.add(one)
        entries: list[TokenLogprobs] = []
        while self._engine.has_work:
            for output in self._engine.step().items:
                entries += output.logprobs or []
        if len(entries) < wanted:
            return Weighed(None)
        scores = dict(entries[command.at].top)
        first, second = scores.get(command.first), scores.get(command.second)
        if first is None or second is None:
            return Weighed(None)
        return Weighed(self._margin(command, first, second))

    def _margin(self, command: Weigh, first: float, second: float) -> float:
        params = command.submit.params
        if params.temperature == 0:
            return first - second
        from engine.sampling.noise import KeyedNoise  # brings torch in

        position = len(command.submit.prompt) + command.at
        [row] = KeyedNoise(self.ready.vocab_size).rows([(params.seed, position)])
        noise = float(row[command.first]) - float(row[command.second])
        return (first - second) / params.temperature + noise

    def _submit(self, submit: Submit, mode: Mode, place: int) -> Submit:
        """The sequence under an id of its own, with the mode's proposers."""
        self._count += 1
        wish = None if mode.proposers is None else Speculation(proposers=mode.proposers)
        params = msgspec.structs.replace(submit.params, speculation=wish)
        id = f"{self._count}-{place}"
        return msgspec.structs.replace(submit, id=id, params=params)


def _add_step(sums: Sums, metrics: StepMetrics, *, full: int) -> None:
    s = metrics.seconds
    if metrics.num_prompt_tokens == 0 and metrics.num_sampling == full:
        sums.steps += 1
        sums.sampling += metrics.num_sampling
        sums.guesses += metrics.num_proposed
        sums.kept += metrics.num_accepted
        sums.verify += s.verify
        sums.propose += s.propose
        sums.host += s.schedule + s.accept + s.commit + s.emit
    sums.rounds += metrics.num_sampling
    sums.generated += metrics.num_generated_tokens
    add_counts(sums.proposed_at, metrics.proposed_at)
    add_counts(sums.accepted_at, metrics.accepted_at)
    for name, (proposed, accepted) in metrics.by_proposer.items():
        before = sums.by_proposer.get(name, (0, 0))
        sums.by_proposer[name] = before[0] + proposed, before[1] + accepted


def add_counts(sums: list[int], more: list[int]) -> None:
    """Add `more` to `sums`, which grows as long."""
    sums.extend([0] * (len(more) - len(sums)))
    for i, amount in enumerate(more):
        sums[i] += amount


def main() -> int:
    """Answer commands until stdin ends. What libraries print on stdout goes to stderr instead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    die_with_parent()
    commands = os.fdopen(os.dup(0), "rb")
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        return serve(commands, events)
    except BrokenPipeError:  # the parent has gone
        return 1


def serve(commands: IO[bytes], events: IO[bytes]) -> int:
    start: Start | None = receive(commands, Start)
    if start is None:
        return 0
    config = EngineConfig.model_validate_json(start.config)
    try:
        runner = _make_runner(config)
    except EngineError as error:
        send(events, Fatal(str(error), useless_to_retry=True))
        return 2
    send(events, runner.ready)
    while (command := receive(commands, Command)) is not None:
        send(events, runner.answer(command))
    return 0


def _make_runner(config: EngineConfig) -> Runner:
    """One thread on a CPU is timed by what it used: others on the machine then hardly matter."""
    limit_threads(config.threads, os.environ)
    from engine.core import Engine  # brings torch in, which reads the environment once

    timer = Timer()
    runner = Runner(Engine(config, clock=timer), clock=timer)
    timer.cpu_time = runner.ready.device == "cpu" and os.environ[VARIABLES[0]] == "1"
    return runner


if __name__ == "__main__":
    sys.exit(main())
