"""The engine child of `foredraft evaluate` (`python -m engine.lab.evaluate`): runs batches of
sequences under any mode and reports texts and times. `server/lab/evaluate` decides what to run;
commands on stdin, answers on stdout (`engine.lab.evaluate_messages`).
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
    CompareTokens,
    Event,
    Margin,
    Mode,
    ModeName,
    Ran,
    Start,
    Sums,
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
    """One engine, one batch at a time."""

    def __init__(self, engine: SwitchingEngine, *, clock: Timer | None = None) -> None:
        self.ready = engine.ready
        self._engine = engine
        self._clock = clock or Timer()
        self._count = 0

    def answer(self, command: Command) -> Event:
        match command:
            case Batch():
                return self.run(command)
            case CompareTokens():
                return self.margin(command)
        return Fatal("this engine has started already")

    def run(self, batch: Batch) -> Ran:
        """All sequences of the batch, to their ends."""
        self._engine.set_speculation(batch.mode.name, batch.mode.k)
        waiting = [self._submit(submit, batch.mode) for submit in batch.submits]
        places = {submit.id: i for i, submit in enumerate(waiting)}
        ran = Ran([[] for _ in waiting], 0.0, Sums())
        full = min(batch.concurrency, len(waiting))
        running = 0
        gc.collect()  # not in the middle of what is timed
        started = self._clock()
        while waiting or self._engine.has_work:
            while waiting and running < batch.concurrency:
                self._engine.add(waiting.pop(0))
                running += 1
            outputs = self._engine.step()
            ran.sums.add(_sums(outputs.metrics, full))
            for output in outputs.items:
                ran.texts[places[output.id]] += output.tokens
                running -= output.finish is not None
                if output.finish == "error":
                    ran.errors[places[output.id]] = output.error or "the engine refused it"
        seconds = self._clock() - started
        return msgspec.structs.replace(ran, seconds=seconds, cpu_time=self._clock.cpu_time)

    def margin(self, command: CompareTokens) -> Margin:
        """Decodes plainly up to the token in question and compares the two candidates."""
        params = msgspec.structs.replace(
            command.submit.params,
            max_tokens=max(command.at + 1, command.submit.params.min_tokens),
            logprobs=min(MAX_LOGPROBS, self.ready.vocab_size),
        )
        submit = self._submit(msgspec.structs.replace(command.submit, params=params), OFF)
        self._engine.set_speculation("off", 0)
        self._engine.add(submit)
        entries: list[TokenLogprobs] = []
        while self._engine.has_work:
            for output in self._engine.step().items:
                entries += output.logprobs or []
        scores = dict(entries[command.at].top) if command.at < len(entries) else {}
        if command.first not in scores or command.second not in scores:
            return Margin(None)
        margin = scores[command.first] - scores[command.second]
        if params.temperature == 0:
            return Margin(margin)
        from engine.sampling.noise import gumbel  # brings torch in

        position = len(submit.prompt) + command.at
        [row] = gumbel([(params.seed, position)], self.ready.vocab_size)
        noise = float(row[command.first]) - float(row[command.second])
        return Margin(margin / params.temperature + noise)

    def _submit(self, submit: Submit, mode: Mode) -> Submit:
        """The sequence under an id of its own, with the mode's proposers."""
        self._count += 1
        wish = None if mode.proposers is None else Speculation(proposers=mode.proposers)
        params = msgspec.structs.replace(submit.params, speculation=wish)
        return msgspec.structs.replace(submit, id=str(self._count), params=params)


def _sums(metrics: StepMetrics, full: int) -> Sums:
    """Of one step; `full`: sequences that run at once."""
    sums = Sums(
        rounds=metrics.num_sampling,
        generated=metrics.num_generated_tokens,
        proposed_at=metrics.proposed_at,
        accepted_at=metrics.accepted_at,
        by_proposer={name: [*counts] for name, counts in metrics.by_proposer.items()},
    )
    if metrics.num_prompt_tokens == 0 and metrics.num_sampling == full:
        s = metrics.seconds
        sums.steps = 1
        sums.sampling = metrics.num_sampling
        sums.guesses = metrics.num_proposed
        sums.kept = metrics.num_accepted
        sums.verify = s.verify
        sums.propose = s.propose
        sums.host = s.schedule + s.accept + s.commit + s.emit
    return sums


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
    try:
        runner = _make_runner(EngineConfig.model_validate_json(start.config))
    except EngineError as error:
        send(events, Fatal(str(error), useless_to_retry=True))
        return 2
    send(events, runner.ready)
    while (command := receive(commands, Command)) is not None:
        send(events, runner.answer(command))
    return 0


def _make_runner(config: EngineConfig) -> Runner:
    """One thread on a CPU is timed by the processor time it got: other load then hardly matters."""
    limit_threads(config.threads, os.environ)
    from engine.core import Engine  # brings torch in, which reads the environment once

    timer = Timer()
    runner = Runner(Engine(config, clock=timer), clock=timer)
    timer.cpu_time = runner.ready.device == "cpu" and os.environ[VARIABLES[0]] == "1"
    return runner


if __name__ == "__main__":
    sys.exit(main())
