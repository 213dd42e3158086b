"""`foredraft tune`: measure what speculation gains for a target on this machine, and report it in
one sentence.

Plain decoding (twice, to measure noise), n-gram look-up and every --draft, with K chosen by the
controller, answer the same prompts in turns, one request at a time and many. Replies end where the
model ends them. Takes --minutes, less if the result is clear, and may be stopped at any time
(Ctrl-C, SIGTERM): it then reports what it knows. A draft is recommended if it is found faster than
plain decoding and than n-gram look-up; all intervals together hold in 95 of 100 runs.

FILE of --prompts: JSON Lines with `prompt` or `messages`, OpenAI's batch format, or plain texts,
separated by blank lines or, if there are none, one per line. Default: built-in prompts.

Exit code 1: a text differs from plain decoding's although equality is guaranteed, or there is no
answer to write to --output. Exit code 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial

from tqdm import tqdm

from engine.arguments import Parser, exit_code, lists_of, number, show, whole
from engine.child import freeze_memory
from engine.config import BUILTIN, EngineConfig, SpeculationConfig, check_folders
from engine.errors import ConfigError
from engine.lab.bench.offline import Offline
from engine.lab.bench.options import (
    add_target,
    clock_of,
    config_of,
    proposer_of,
    set_threads,
    tokenizer_of,
)
from engine.lab.comparison.prompt_files import renderer
from engine.lab.comparison.workload import SEED, Arm, Request
from engine.lab.files import writable, write_json, write_text
from engine.lab.tune.measuring import PER_LANE, Measuring
from engine.lab.tune.prompts import built_in, from_file, requests
from engine.lab.tune.report import as_dict, lines, sentence
from engine.lab.tune.settings import config_text, settings_of
from engine.model.fit import compare_files
from engine.model.pair import load_pair

MOST_PROMPTS, LONGEST_PROMPT = 256, 1024  # prompts; tokens per prompt
CACHED = 65_536  # tokens of prompts in the prefix cache, if one round's fit
_TO_END = 8.0  # seconds reserved for the imports before, for the last turn and for printing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    parsed = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return exit_code("foredraft tune", lambda: tune(parsed))


def build_parser() -> Parser:
    parser = Parser("foredraft tune", __doc__)
    add = parser.add_argument
    add_target(parser)
    add("--draft", dest="drafts", action="append", metavar="MODEL",
        help="folder or hub name; self or self:N: the target's own first layers; may be repeated;"
        " the built-in target has the built-in draft")  # fmt: skip
    add("--prompts", metavar="FILE", help="your own prompts")
    add("--tokens", type=whole(8, 4096), default=200, metavar="N", help="longest reply (200)")
    add("--concurrency", type=whole(2, 256), default=16, metavar="N",
        help="requests at a time, beside one (16)")  # fmt: skip
    add("--temperatures", type=lists_of(number(0, 2)), default=(0.0, 1.0), metavar="T,T,...",
        help="in turn (0,1)")  # fmt: skip
    add("--minutes", type=number(0, 1e4, above=True), default=5.0,
        help="limit, loading included; fewer than 3 seldom give an answer (5)")  # fmt: skip
    add("--seed", type=whole(0, 2**31), default=0, help="of the prompts' order and of sampling (0)")
    add("--output", metavar="FILE.toml", help="write the configuration to serve with")
    add("--overwrite", action="store_true", help="replace an existing --output file")
    add("--json", metavar="FILE", help="write all figures")
    return parser


def tune(parsed: argparse.Namespace) -> int:
    """Measure, print and write; return the exit code. Raises EngineError."""
    end = time.monotonic() + 60 * parsed.minutes - _TO_END
    reads = [parsed.prompts] if parsed.prompts else []
    writable({"--output": parsed.output, "--json": parsed.json}, reads=reads)
    if parsed.output and os.path.exists(parsed.output) and not parsed.overwrite:
        raise ConfigError(f"--output {parsed.output} exists already; --overwrite replaces it")
    clock_of(parsed)  # raises early if the clock cannot be used
    drafts = parsed.drafts or ([BUILTIN] if parsed.target == BUILTIN else [])
    plain = config_of(parsed, {"kind": "none"})
    configs = {name: config_of(parsed, proposer_of(name, parsed.dtype)) for name in drafts}
    for config in (plain, *configs.values()):
        check_folders(config)
        compare_files(config.target, config.speculation.proposer)
    settings = settings_of({name: c.speculation.proposer for name, c in configs.items()})
    set_threads(parsed.threads)
    player, stream = load(parsed, plain, settings)
    with asked_to_stop() as stopped, bar(end) as move:
        found = Measuring(
            player, list(settings), stream, many=parsed.concurrency, exact=player.exact, end=end,
            clock=time.monotonic, stopped=lambda: move() or stopped(),
        ).run()  # fmt: skip
    show("\n".join(lines(found)))
    write_json(parsed.json, as_dict(found))
    if parsed.output is not None and not found.is_answered:
        sys.stderr.write(f"{parsed.output} is not written: there is no answer yet\n")
        return 1
    if parsed.output is not None:
        update = {"speculation": settings[found.best()], "threads": parsed.threads}
        comment = f"foredraft tune, {date.today().isoformat()}: {sentence(found)}"
        write_text(parsed.output, config_text(plain.model_copy(update=update), comment))
        sys.stderr.write(f"written; to use it: foredraft serve {parsed.output}\n")
    return int(not found.passed)


def load(
    parsed: argparse.Namespace, plain: EngineConfig, settings: Mapping[Arm, SpeculationConfig]
) -> tuple[Offline, Iterator[Request]]:
    """Return the engines of all arms, and their requests. Raises EngineError."""
    tokenizer = tokenizer_of(parsed.target)
    render, file = renderer(tokenizer), parsed.prompts
    prompts = (
        from_file(file, render, parsed.seed, MOST_PROMPTS)
        if file
        else built_in(render, parsed.seed)
    )
    encode = partial(tokenizer.encode, add_special_tokens=False)
    sys.stderr.write(f"loading {parsed.target}\n")
    pair = load_pair(plain)
    limit = pair.target.max_model_len
    most = min(limit - parsed.tokens - 1, LONGEST_PROMPT)
    if most < 1:
        raise ConfigError(
            f"--tokens is {parsed.tokens}, but {parsed.target} takes {limit}, the prompt included"
        )
    longest = max(len(encode(prompt)) for prompt in prompts)
    if longest > most:
        sys.stderr.write(f"prompts longer than {most} tokens are cut to their last {most}\n")
    longest = min(longest, most)
    cached = min(len(prompts), max(PER_LANE * parsed.concurrency, CACHED // longest))
    names = ", ".join(arm.name for arm in settings)
    sys.stderr.write(f"starting an engine for each of {names}\n")
    player = Offline(
        plain, pair, encode, list(settings), concurrency=parsed.concurrency, prompts=cached,
        reply=parsed.tokens, longest_prompt=longest, settings=settings, clock=clock_of(parsed),
    )  # fmt: skip
    freeze_memory().join()  # as a server does
    return player, requests(prompts, parsed.temperatures, parsed.tokens, SEED + parsed.seed)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Give a function that tells whether a signal asked to stop; a second signal interrupts."""
    signals: list[int] = []

    def ask(number: int, frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def bar(end: float) -> Iterator[Callable[[], None]]:
    """Show a progress bar of the time on a terminal; the yielded function updates it."""
    began = time.monotonic()
    left, form = max(round(end - began), 0), "measuring {l_bar}{bar}| {n_fmt} of {total_fmt} s"
    sys.stderr.write(f"measuring for {left} s at most\n")
    with tqdm(total=left, leave=False, disable=None, bar_format=form) as shown:

        def move() -> None:
            shown.n = min(round(time.monotonic() - began), left)
            shown.refresh()

        yield move


if __name__ == "__main__":
    sys.exit(main())
