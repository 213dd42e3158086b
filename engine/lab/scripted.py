"""A scripted engine for `foredraft bench front`: speaks the engine protocol without a model.

`python -m engine.lab.scripted --config .. --commands .. --events .. ...` runs the real
EngineProcess around an engine whose replies repeat their prompt, in steps of fixed duration.
Speculation is simulated: each step commits `tokens_per_step` tokens, all but one "accepted". Does
not import torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.__main__ import build_parser, read_config
from engine.arguments import number, whole
from engine.child import follow_parent
from engine.logs import configure_logging
from engine.messages import (
    Estimates,
    FinishReason,
    Mode,
    Output,
    Outputs,
    Ready,
    StepMetrics,
    Submit,
    Swap,
)
from engine.process import EngineProcess


@dataclass
class Running:
    """One sequence."""

    submit: Submit
    tokens: list[int]
    rounds: int = 0
    proposed: int = 0


class ScriptedEngine:
    """A scripted engine.process.StepEngine. Honours max_tokens and stop_token_ids.

    A step begins `step_seconds` after the previous one began, or at once if that is past.
    """

    def __init__(self, ready: Ready, *, step_seconds: float = 0.0) -> None:
        self.ready = ready
        self.running: dict[str, Running] = {}
        self.ended: list[Output] = []
        self.num_steps = self.num_tokens = 0
        self.swap: Swap | None = None
        self.draft = ready.k_max  # draft tokens per step, all accepted
        self._step_seconds = step_seconds
        self._next_step = time.monotonic()

    def next_token(self, running: Running) -> int:
        """Return the next token of the repeated prompt, which is text for any vocabulary."""
        return running.tokens[-len(running.submit.prompt)]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.ended)

    def add(self, submit: Submit) -> None:
        begun = submit.begun
        tokens = submit.prompt + begun.tokens
        self.running[submit.id] = Running(submit, tokens, begun.rounds, begun.proposed)

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            if self.running.pop(id, None) is not None:
                self.ended.append(Output(id=id, finish="abort"))

    def gauges(self) -> StepMetrics:
        swap, self.swap = self.swap, None
        return StepMetrics(
            step=self.num_steps,
            num_running=len(self.running),
            blocks_total=self.ready.num_blocks,
            estimates=Estimates(k=self.draft, reason="fixed"),
            swap=swap,
        )

    def set_speculation(self, mode: Mode, k: int = 0) -> None:
        """Do nothing: the command line fixes the load."""

    def swap_draft(self, path: str) -> None:
        """Refuse: there is no draft model."""
        self.swap = Swap(path, "refused", "this engine is a script, without a draft model", "")

    def step(self) -> Outputs:
        time.sleep(max(self._next_step - time.monotonic(), 0.0))
        # Counted from the due time, so that late wake-ups do not lower the rate.
        self._next_step = max(self._next_step + self._step_seconds, time.monotonic())
        self.num_steps += 1
        items, self.ended = self.ended, []
        num_ended, before = len(items), self.num_tokens
        for id, running in list(self.running.items()):
            output = self._advance(running)
            items.append(output)
            if output.finish is not None:
                del self.running[id]
        metrics = self.gauges()
        metrics.num_sampling = len(items) - num_ended
        metrics.num_generated_tokens = self.num_tokens - before
        return Outputs(items, metrics)

    def _advance(self, running: Running) -> Output:
        params, limit = running.submit.params, running.submit.params.max_tokens
        num_before = len(running.tokens) - len(running.submit.prompt)
        tokens: list[int] = []
        finish: FinishReason | None = None
        while finish is None and len(tokens) < 1 + self.draft:
            tokens.append(self.next_token(running))
            running.tokens.append(tokens[-1])
            if tokens[-1] in params.stop_token_ids:
                finish = "stop"
            elif num_before + len(tokens) >= limit:
                finish = "length"
        running.rounds += 1
        running.proposed += self.draft
        self.num_tokens += len(tokens)
        return Output(
            id=running.submit.id,
            tokens=tokens,
            finish=finish,
            stop_token=tokens[-1] if finish == "stop" else None,
            cached_tokens=0 if num_before == 0 else None,
            queued=0.0 if num_before == 0 else None,
            rounds=running.rounds,
            proposed=running.proposed,
            accepted=num_before + len(tokens) - running.rounds,
            source=self.ready.proposer if self.draft else "",
        )


def make_ready(*, vocab_size: int, k_max: int, max_model_len: int = 4096) -> Ready:
    """Return the Ready message of a scripted engine; the last token id is EOS."""
    return Ready(
        pid=os.getpid(),
        target="scripted",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_ids=[vocab_size - 1],
        num_blocks=64,
        block_size=16,
        dtype="float32",
        device="cpu",
        attention="none",
        proposer="scripted",
        controller="fixed",
        k_max=k_max,
        exact=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    follow_parent()
    configure_logging("info")
    parser = build_parser("python -m engine.lab.scripted", __doc__)
    parser.add_argument("--step-seconds", type=number(0), default=0.0)
    parser.add_argument("--tokens-per-step", type=whole(1, 10**6), default=1)
    parser.add_argument("--vocab-size", type=whole(2, 2**31), default=258)
    parsed = parser.parse_args(arguments)
    read_config(parsed.config)  # checks that the supervisor's file is readable
    ready = make_ready(vocab_size=parsed.vocab_size, k_max=parsed.tokens_per_step - 1)
    engine = ScriptedEngine(ready, step_seconds=parsed.step_seconds)
    return EngineProcess(lambda: engine, parsed.commands, parsed.events).run()


if __name__ == "__main__":
    sys.exit(main())
