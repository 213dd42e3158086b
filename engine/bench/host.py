"""`python -m engine.bench.host`: microseconds of a step outside of its forwards, by verb.

Medians over steps of pure decode, in CPU time of the engine's thread, so that other work on the
machine is not counted (give one thread, or the forwards are not either). Prompts are pseudo-random.
`auto` is the adaptive controller, other rows are its absence. Prints a table and, as the last line,
one JSON object. Exit code 0; 2 if the pair cannot be loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import msgspec
import torch
import zmq

from engine.arguments import Parser
from engine.config import BUILTIN, EngineConfig
from engine.core import Engine
from engine.errors import ConfigError, EngineError
from engine.messages import SamplingParams, Submit
from engine.pair import Pair, load_pair
from engine.threads import VARIABLES, engine_threads, granted_cores

VERBS = ("schedule", "propose", "prepare", "accept", "commit", "emit", "observe, adapt", "send")
PROMPT = 48  # tokens
SETTLE = 24  # steps that are not counted

Laps = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parsed = build_parser().parse_args(arguments)
    try:
        _refuse(parsed)
        if parsed.threads or VARIABLES[0] not in os.environ:
            torch.set_num_threads(parsed.threads or engine_threads(granted_cores()))
        return run(parsed)
    except EngineError as error:
        print(f"python -m engine.bench.host: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> Parser:
    parser = Parser(prog="python -m engine.bench.host", description=__doc__)
    parser.add_argument("--target", default=BUILTIN, help="model folder or hub name")
    parser.add_argument("--draft", default=BUILTIN, help="draft folder or hub name")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as the server does")
    parser.add_argument("--steps", type=int, default=200, help="of every row (20 to 10000)")
    parser.add_argument("--k", type=int, default=4, help="guesses a round (1 to 16)")
    parser.add_argument("--batches", default="1,32", help="sequences at once, such as 1,32")
    return parser


def _refuse(parsed: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for name, (low, high) in {"steps": (20, 10000), "k": (1, 16), "threads": (1, 1024)}.items():
        given = getattr(parsed, name)
        if given is not None and not low <= given <= high:
            raise ConfigError(f"{name} is {given}; allowed are {low} to {high}")
    words = parsed.batches.split(",")
    if not all(word.isdigit() and 1 <= int(word) <= 1024 for word in words):
        raise ConfigError(f"batches is {parsed.batches!r}; give numbers from 1 to 1024, as in 1,32")


def run(parsed: argparse.Namespace) -> int:
    """Measure and print. Raises EngineError."""
    pair = load_pair(
        EngineConfig.model_validate(
            {
                "target": {"path": parsed.target},
                "speculation": {"proposer": {"path": parsed.draft}},
            }
        )
    )
    if pair.target.max_model_len < PROMPT + SETTLE:
        raise ConfigError(f"the target is for {pair.target.max_model_len} tokens only")
    rows = []
    print(_line(["batch", "T", "K", *VERBS, "sum", "forwards"]))
    batches = [int(word) for word in parsed.batches.split(",")]
    for batch, temperature, k in product(batches, (0.0, 1.0), (0, parsed.k, None)):
        found = measure(pair, batch=batch, temperature=temperature, k=k, steps=parsed.steps)
        rows.append({"batch": batch, "temperature": temperature, "k": k, **found})
        name = "auto" if k is None else str(k)
        values = [f"{found[verb]:.0f}" for verb in (*VERBS, "sum", "forwards")]
        print(_line([str(batch), f"{temperature:g}", name, *values]), flush=True)
    print(json.dumps({"unit": "microseconds", "steps": parsed.steps, "rows": rows}))
    return 0


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{max(len(cell), 8) + 1}}" for cell in cells)


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
    gc.collect()
    gc.freeze()
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
