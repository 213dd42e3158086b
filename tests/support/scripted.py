"""The scripted engine with faults, as a child process: the real EngineProcess, without torch.

`python tests/support/scripted.py --config .. --commands .. --events ..`; the script is the JSON of
`Script` in the environment variable FOREDRAFT_SCRIPT. Tokens follow a rule that a test can apply
too: `next_token`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

import engine.lab.scripted
from engine.__main__ import build_parser, read_config
from engine.child import follow_parent
from engine.errors import ModelError
from engine.lab.scripted import Running, make_ready
from engine.logs import configure_logging
from engine.messages import Estimates, Mode, Outputs, Ready, Reason, StepMetrics, Submit
from engine.process import EngineProcess
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import Sequence as Held

VARIABLE = "FOREDRAFT_SCRIPT"
COMMAND = (sys.executable, str(Path(__file__).resolve()))


@dataclass(frozen=True)
class Script:
    """What this child does. Token counts are over all requests of the child's life."""

    vocab_size: int = 258
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    refuse_to_start: str | None = None  # an EngineError with this sentence: exit code 2
    crash_at_start: bool = False  # an unexpected exception: exit code 1
    exit_seconds: float = 0.0  # between the last event and the exit, as with torch
    raise_after: int | None = None  # an unexpected exception in the step after that many tokens
    die_after: int | None = None  # SIGKILL to itself
    hang_after: int | None = None  # sleeps for ever inside a step
    blocks: int = 0  # of the prefix cache, 16 tokens each; 0: no prefix cache
    row_seconds: float = 0.0  # added to a step for each prompt token that is not cached
    only_once: str | None = None  # a path: only the child that creates it has the faults above

    def environment(self) -> dict[str, str]:
        """Return the environment of a child that follows this script."""
        return {**os.environ, VARIABLE: json.dumps(dataclasses.asdict(self))}


def next_token(tokens: Sequence[int], vocab_size: int = 258) -> int:
    """Return the token after `tokens` (prompt and output so far)."""
    return (sum(tokens) + len(tokens)) % vocab_size


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int = 258) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


class ScriptedEngine(engine.lab.scripted.ScriptedEngine):
    """Has the script's faults, and can switch between speculation modes."""

    def __init__(self, script: Script, ready: Ready) -> None:
        super().__init__(ready)
        self.script = script
        self.mode: Mode = "auto"
        self.pool = BlockPool(script.blocks, 16, prefix_caching=True)
        self._held: dict[str, tuple[Held, Running]] = {}
        self._queried = self._rows = 0  # prompt tokens since the last step; uncached ones

    def set_speculation(self, mode: Mode, k: int = 0) -> None:
        self.mode, self.draft = mode, {"auto": self.ready.k_max, "fixed": k, "off": 0}[mode]

    def gauges(self) -> StepMetrics:
        metrics = super().gauges()
        reason: Reason = "fixed" if self.draft else "off"
        metrics.estimates = Estimates(mode=self.mode, k=self.draft, reason=reason)
        return metrics

    def add(self, submit: Submit) -> None:
        super().add(submit)
        running = self.running[submit.id]
        seq = Held(submit.id, submit.params, list(running.tokens), len(submit.prompt))
        self.pool.adopt(seq, self.pool.match(seq))
        seq.cached_tokens = len(seq.blocks) * self.pool.block_size
        self._held[submit.id] = seq, running
        self._queried += len(seq.tokens)
        self._rows += len(seq.tokens) - seq.cached_tokens
        self._publish(seq)

    def _publish(self, seq: Held) -> None:
        if self.pool.reserve(seq, len(seq.tokens)):
            self.pool.publish(seq, len(seq.tokens))

    def next_token(self, running: Running) -> int:
        return next_token(running.tokens, self.script.vocab_size)

    def step(self) -> Outputs:
        self._trouble()
        queried, rows = self._queried, self._rows
        self._queried = self._rows = 0
        time.sleep(self.script.step_seconds + self.script.row_seconds * rows)
        outputs = super().step()
        for i, item in enumerate(outputs.items):
            if item.cached_tokens is not None:
                cached = self._held[item.id][0].cached_tokens
                outputs.items[i] = msgspec.structs.replace(item, cached_tokens=cached)
        outputs.metrics.queried_tokens, outputs.metrics.cached_tokens = queried, queried - rows
        for id in self._held.keys() - self.running.keys():
            seq, running = self._held.pop(id)
            seq.tokens[:] = running.tokens[:-1]  # the last token has no KV
            self._publish(seq)
            self.pool.release(seq)
        return outputs

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


def make_engine(script: Script, measured: bytes = b"") -> ScriptedEngine:
    """`measured`: step costs, passed on to the next engine."""
    time.sleep(script.start_seconds)
    if script.refuse_to_start is not None:
        raise ModelError(script.refuse_to_start)
    if script.crash_at_start:
        raise RuntimeError("the script says so")
    ready = make_ready(vocab_size=script.vocab_size, k_max=script.tokens_per_step - 1)
    ready = msgspec.structs.replace(ready, measured=measured)
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
    configure_logging("info")
    parser = build_parser("python -m tests.support.scripted", __doc__)
    parser.add_argument("--refuse-threads", type=int)  # a configuration that cannot start
    parsed = parser.parse_args()
    config = read_config(parsed.config)  # checks that the supervisor's file is readable
    script = load_script()
    measured = parsed.measured.read_bytes() if parsed.measured is not None else b""
    if config.threads is not None and config.threads == parsed.refuse_threads:
        script = dataclasses.replace(script, refuse_to_start=f"no {config.threads} threads here")
    make = partial(make_engine, script, measured + b"1")
    code = EngineProcess(make, parsed.commands, parsed.events).run()
    time.sleep(script.exit_seconds)
    return code


if __name__ == "__main__":
    sys.exit(main())
