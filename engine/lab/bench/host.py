"""`python -m engine.lab.bench.host`: microseconds of a step outside of its forwards, by verb.

Medians over steps of pure decode, in CPU time of the engine's thread, so that other work on the
machine is not counted (give one thread, or the forwards are not either). Prompts are pseudo-random.
`auto` is the adaptive controller, other rows are its absence. Prints a table and, as the last line,
one JSON object. Exit code 0; 2 if the pair cannot be loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import msgspec
import torch
import zmq

from engine.arguments import Parser, lists_of, whole
from engine.child.freeze import freeze_memory
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.bench.options import add_pair, execute, pair_config, set_threads
from engine.lab.comparison.report import table
from engine.messages import SamplingParams, Submit
from engine.model.pair import Pair, load_pair

VERBS = ("schedule", "propose", "prepare", "accept", "commit", "emit", "observe, adapt", "send")
PROMPT = 48  # tokens
SETTLE = 24  # steps that are not counted

Laps = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return execute(build_parser(), run, arguments)


def build_parser() -> Parser:
    parser = Parser("python -m engine.lab.bench.host", __doc__)
    add_pair(parser)
    add = parser.add_argument
    add("--steps", type=whole(20, 10000), default=200, metavar="N", help="of every row (200)")
    add("--k", type=whole(1, 16), default=4, metavar="K", help="guesses a round (4)")
    add("--batches", type=lists_of(whole(1, 1024)), default=(1, 32), metavar="N,N,...",
        help="sequences at once (1,32)")  # fmt: skip
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    set_threads(parsed.threads)
    pair = load_pair(pair_config(parsed))
    if pair.target.max_model_len < PROMPT + SETTLE:
        raise ConfigError(f"the target is for {pair.target.max_model_len} tokens only")
    rows = []
    lines = [["batch", "T", "K", *VERBS, "sum", "forwards"]]
    for batch, temperature, k in product(parsed.batches, (0.0, 1.0), (0, parsed.k, None)):
        found = measure(pair, batch=batch, temperature=temperature, k=k, steps=parsed.steps)
        rows.append({"batch": batch, "temperature": temperature, "k": k, **found})
        name = "auto" if k is None else str(k)
        values = [f"{found[verb]:.0f}" for verb in (*VERBS, "sum", "forwards")]
        lines.append([str(batch), f"{temperature:g}", name, *values])
    print("\n".join(table(lines)))
    print(json.dumps({"unit": "microseconds", "steps": parsed.steps, "rows": rows}))
    return 0


def measure(
    pair: Pair, *, batch: int, temperature: float, k: int | None, steps: int
) -> dict[str, float]:
    """Median microseconds by verb, of their sum, and of both forwards. `k` None: adaptive."""
    kind: dict[str, Any] = {"kind": "adaptive"} if k is None else {"kind": "fixed", "k": k or 1}
    said = {"speculation": {"controller": kind}, "schedule": {"max_sequences": batch}}
    stamps: list[float] = []
    engine = Engine(EngineConfig.model_validate(said), pair=pair, clock=_recording(stamps))
    if k == 0:
        engine.set_speculation("off")
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://host")
    outbox.connect("inproc://host")
    freeze_memory()
    try:
        laps = _steps(engine, _requests(engine, batch, temperature), steps, stamps, outbox)
    finally:
        context.destroy(linger=0)
        gc.unfreeze()
    found = {name: 1e6 * median(seconds) for name, seconds in laps.items()}
    return {**found, "sum": sum(found[verb] for verb in VERBS)}


def _recording(stamps: list[float]) -> Callable[[], float]:
    def clock() -> float:
        stamps.append(time.thread_time())
        return stamps[-1]

    return clock


def _requests(engine: Engine, batch: int, temperature: float) -> Callable[[], None]:
    """A function that keeps `batch` sequences in the engine."""
    generator = torch.Generator().manual_seed(0)
    ids = [f"host-{i}" for i in range(batch)]
    length = engine.ready.max_model_len - PROMPT

    def submit() -> None:
        for i, name in enumerate(ids):
            prompt = torch.randint(0, engine.ready.vocab_size, (PROMPT,), generator=generator)
            params = SamplingParams(
                seed=i, max_tokens=length, temperature=temperature, ignore_eos=True
            )
            engine.add(Submit(name, prompt.tolist(), params, 0.0))

    return submit


def _steps(
    engine: Engine, submit: Callable[[], None], count: int, stamps: list[float], outbox: Any
) -> Laps:
    laps: Laps = {name: [] for name in (*VERBS, "forwards")}
    encode = msgspec.msgpack.Encoder().encode
    settle = 0
    while len(laps["forwards"]) < count:
        if not engine.has_work:
            submit()
            settle = SETTLE
        stamps.clear()
        outputs = engine.step()
        done = time.thread_time()
        outbox.send(encode(outputs))
        sent = time.thread_time()
        metrics = outputs.metrics
        settle -= 1
        if settle > 0 or metrics.num_prompt_tokens or not metrics.num_sampling:
            continue
        _note(laps, metrics.seconds, done - stamps[-1], sent - done)
    return laps


def _note(laps: Laps, seconds: Any, after: float, send: float) -> None:
    found = (
        seconds.schedule,
        seconds.propose - seconds.propose_forward,
        seconds.verify - seconds.verify_forward,
        seconds.accept,
        seconds.commit,
        seconds.emit,
        after,
        send,
    )
    for name, value in zip(VERBS, found, strict=True):
        laps[name].append(value)
    laps["forwards"].append(seconds.propose_forward + seconds.verify_forward)


if __name__ == "__main__":
    sys.exit(main())
