"""A child that speaks the wire from a script: the real EngineProcess, an engine without torch.

`python tests/support/scripted.py --config .. --commands .. --events ..`; the script is the JSON of
`Script` in the environment variable FORETOKEN_SCRIPT. Tokens follow a rule that a test can repeat:
`next_token`. Speculation is played: each step commits `tokens_per_step`, all but one "accepted".
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.__main__ import parse, read_config
from engine.errors import ModelError
from engine.messages import (
    Estimates,
    FinishReason,
    Mode,
    Output,
    Outputs,
    Ready,
    StepMetrics,
    Submit,
)
from engine.process import EngineProcess, follow_parent

VARIABLE = "FORETOKEN_SCRIPT"
COMMAND = (sys.executable, str(Path(__file__).resolve()))


@dataclass(frozen=True)
class Script:
    """What this child does. Tokens are counted over all requests of the child's life."""

    vocab_size: int = 258
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    refuse_to_start: str | None = None  # an EngineError with this sentence: exit code 2
    crash_at_start: bool = False  # an unexpected exception: exit code 1
    exit_seconds: float = 0.0  # between the last word and the exit, as with torch imported
    raise_after: int | None = None  # an unexpected exception in the step after that many tokens
    die_after: int | None = None  # SIGKILL to itself
    hang_after: int | None = None  # sleeps for ever inside a step
    only_once: str | None = None  # a path: the troubles above befall only the first to create it

    def environment(self) -> dict[str, str]:
        """The environment of a child that follows this script."""
        return {**os.environ, VARIABLE: json.dumps(dataclasses.asdict(self))}


def next_token(tokens: Sequence[int], vocab_size: int = 258) -> int:
    """The token after `tokens` (prompt and output so far)."""
    return (sum(tokens) + len(tokens)) % vocab_size


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int = 258) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class _Running:
    submit: Submit
    tokens: list[int]
    rounds: int = 0
    proposed: int = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.submit.prompt)


@dataclass
class ScriptedEngine:
    """engine.process.StepEngine, by script. Honours max_tokens and stop_token_ids."""

    script: Script
    ready: Ready
    running: dict[str, _Running] = field(default_factory=dict)
    ended: list[Output] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    mode: Mode = "auto"
    k: int = 0  # of the mode fixed

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.ended)

    def add(self, submit: Submit) -> None:
        self.running[submit.id] = _Running(submit, list(submit.prompt))

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            if self.running.pop(id, None) is not None:
                self.ended.append(Output(id=id, finish="abort"))

    def gauges(self) -> StepMetrics:
        return StepMetrics(
            step=self.num_steps,
            num_running=len(self.running),
            blocks_total=64,
            estimates=Estimates(
                mode=self.mode, k=self.draft, reason="fixed" if self.draft else "off"
            ),
        )

    def set_speculation(self, mode: Mode, k: int = 0) -> None:
        self.mode, self.k = mode, k

    @property
    def draft(self) -> int:
        """Guesses of a step, all of them right."""
        k_max = self.script.tokens_per_step - 1
        return {"auto": k_max, "fixed": self.k, "off": 0}[self.mode]

    def step(self) -> Outputs:
        self._trouble()
        time.sleep(self.script.step_seconds)
        self.num_steps += 1
        items, self.ended = self.ended, []
        for id, running in list(self.running.items()):
            output = self._advance(running)
            items.append(output)
            if output.finish is not None:
                del self.running[id]
        return Outputs(items, self.gauges())

    def _advance(self, running: _Running) -> Output:
        params = running.submit.params
        tokens: list[int] = []
        finish: FinishReason | None = None
        while finish is None and len(tokens) < 1 + self.draft:
            tokens.append(next_token(running.tokens, self.script.vocab_size))
            running.tokens.append(tokens[-1])
            if tokens[-1] in params.stop_token_ids:
                finish = "stop"
            elif running.num_output >= params.max_tokens:
                finish = "length"
        running.rounds += 1
        running.proposed += self.draft
        self.num_tokens += len(tokens)
        return Output(
            id=running.submit.id,
            tokens=tokens,
            finish=finish,
            stop_token=tokens[-1] if finish == "stop" else None,
            cached_tokens=0 if running.rounds == 1 else None,
            rounds=running.rounds,
            proposed=running.proposed,
            accepted=running.num_output - running.rounds,
        )

    def _trouble(self) -> None:
        script = self.script
        if _due(script.raise_after, self.num_tokens):
            raise RuntimeError("the script says so")
        if _due(script.die_after, self.num_tokens):
            os.kill(os.getpid(), signal.SIGKILL)
        while _due(script.hang_after, self.num_tokens):
            time.sleep(1)


def _due(limit: int | None, count: int) -> bool:
    return limit is not None and count >= limit


def make_engine(script: Script) -> ScriptedEngine:
    time.sleep(script.start_seconds)
    if script.refuse_to_start is not None:
        raise ModelError(script.refuse_to_start)
    if script.crash_at_start:
        raise RuntimeError("the script says so")
    ready = Ready(
        pid=os.getpid(),
        target="scripted",
        max_model_len=4096,
        vocab_size=script.vocab_size,
        eos_ids=[script.vocab_size - 1],
        num_blocks=64,
        block_size=16,
        dtype="float32",
        device="cpu",
        attention="none",
        proposer="scripted",
        controller="fixed",
        k_max=script.tokens_per_step - 1,
    )
    return ScriptedEngine(script, ready)


def load_script() -> Script:
    script = Script(**json.loads(os.environ.get(VARIABLE, "{}")))
    if script.only_once is not None:
        try:
            Path(script.only_once).touch(exist_ok=False)
        except FileExistsError:
            return Script(tokens_per_step=script.tokens_per_step, step_seconds=script.step_seconds)
    return script


def main() -> int:
    follow_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    parsed = parse(None)
    read_config(parsed.config)  # what the supervisor wrote must be readable
    script = load_script()
    code = EngineProcess(lambda: make_engine(script), parsed.commands, parsed.events).run()
    time.sleep(script.exit_seconds)
    return code


if __name__ == "__main__":
    sys.exit(main())
