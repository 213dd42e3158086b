"""Code shared by the training programs: options, data, checkpoints, and resuming.

The folder of an unfinished run holds `data`, with the options and all rows, and `state`, with
everything the next step depends on.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from engine.arguments import Parser, exit_code, number, show, whole
from engine.config import BUILTIN, EngineConfig, check_folders, model_folder
from engine.core import Engine
from engine.errors import ConfigError, one_line
from engine.lab.bench.options import tokenizer_of
from engine.lab.comparison.prompt_files import read_text, read_texts, renderer
from engine.lab.files import replace_file, writable
from engine.lab.train.data import Rows, Text, batches, parted, written
from engine.lab.train.learning import Optimizers, Run, fit, log
from engine.model.checkpoint import quietly
from engine.model.loader import pick_device
from engine.model.pair import Pair, load_pair
from engine.step.id_log import read_ids

ROWS = 8  # rows per batch
MOST_HELD = 32  # held-out rows per source for evaluation
WRITING = 0.25  # largest share of the minutes for the target's own output
BEGUN, SHARE = 64, 0.25  # most batches for the initialisation, and its largest share of the run
CHECKPOINT = 60.0  # seconds between checkpoints
FREE = {"minutes", "steps", "threads", "nice", "device", "resume"}  # --resume may change them


DATA = """
Learns from --text, from the target's replies to --prompts, from requests that a server recorded
(--ids, see speculation.record_ids), and from the target's own continuations of passages of all
these. A tenth is held out. The target is not changed.

Runs on one thread with low priority, to spare a server on the same machine. Checkpoints are written
every minute; --resume with the same options continues a run that was stopped or killed.
"""

Train = Callable[[argparse.Namespace, Path, Any, Any], str]
Check = Callable[[argparse.Namespace], None]
Fits = Callable[[argparse.Namespace, Pair], None]


def parser_of(kind: str, about: str | None, made: str) -> Parser:
    """Return the parser of a program that trains this kind, with the options for target, data,
    training and output. `made`: what is written, for help."""
    parser = Parser(f"foredraft train {kind}", f"{about}{DATA}")
    add = parser.add_argument
    add("--target", default=BUILTIN, metavar="MODEL", help="folder or hub name (the built-in one)")
    add("--text", nargs="+", default=[], metavar="FILE", help="text to learn from, UTF-8")
    add("--prompts", metavar="FILE", help="prompts that the target answers")
    add("--ids", nargs="+", default=[], metavar="FILE", help="written by speculation.record_ids")
    add("--output", required=True, type=Path, metavar="DIR", help=f"a new folder, for {made}")
    add("--minutes", type=number(0, 1e6, above=True), default=10, help="of learning (10)")
    add("--steps", type=whole(1, 10**9), metavar="N", help="train for N steps instead of --minutes")
    add("--held-out", type=number(0.001, 0.9), default=0.1, metavar="SHARE", help="(0.1)")
    add("--length", type=whole(16, 1 << 16), default=256, metavar="N", help="tokens of a row (256)")
    add("--reply", type=whole(1, 1 << 16), default=128, metavar="N",
        help="tokens that the target writes at a time, at most (128)")  # fmt: skip
    add("--continued", type=whole(0, 10**6), default=64, metavar="N",
        help="passages that the target continues (64)")  # fmt: skip
    add("--seed", type=whole(0, 2**31), default=0, metavar="N", help="random seed (0)")
    add("--resume", action="store_true", help="continue from the last checkpoint")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="to learn on (auto)")
    add("--threads", type=whole(1, 1024), default=1, metavar="N", help="(1)")
    add("--nice", type=whole(0, 19), default=10, metavar="N", help="how low the priority is (10)")
    return parser


def main(
    parser: Parser, arguments: Sequence[str] | None, train: Train,
    check: Check = lambda parsed: None, fits: Fits = lambda parsed, pair: None,
) -> int:  # fmt: skip
    """Run a program; return the exit code. `check` and `fits` may raise ConfigError if options
    contradict each other or do not fit the target."""
    parsed = parser.parse_args(arguments)
    vars(parsed).setdefault("draft", None)  # the target writes its data without a draft
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    return exit_code(parser.prog, lambda: run(parsed, train, check, fits))


def run(parsed: argparse.Namespace, train: Train, check: Check, fits: Fits) -> int:
    """Collect data, then call `train` with the options, folder, target and data: it saves what is
    trained and returns a report. Return the exit code. Raises EngineError."""
    check(parsed)
    refuse_data(parsed)
    work = parsed.output.with_name(parsed.output.name + ".training")
    options = {name: str(value) for name, value in vars(parsed).items() if name not in FREE}
    begun = has_begun(work, resume=parsed.resume)
    if begun:
        refuse_another(work, options)
    os.nice(parsed.nice)
    torch.set_num_threads(parsed.threads)
    torch.set_flush_denormal(True)
    try:
        with quietly():
            if not begun:
                data = collected(parsed, fits)
                work.mkdir(exist_ok=True)
                keep(work / "data", {"options": options, **data})
            target = frozen(parsed)
            words = train(parsed, work, target, load(work / "data", target.device))
    finally:
        torch.set_flush_denormal(False)  # the setting belongs to the thread
    shutil.rmtree(work, ignore_errors=True)
    return show(words)


def refuse_data(parsed: argparse.Namespace) -> None:
    """Raise ConfigError if no data is given, if no row would have a position with a token for every
    head or depth, or if the output cannot be written."""
    if not (parsed.text or parsed.ids or parsed.prompts):
        raise ConfigError("there is nothing to learn from: give --text, --prompts or --ids")
    for name in {"heads", "depth"} & vars(parsed).keys():
        if parsed.length < (count := getattr(parsed, name)) + 2:
            raise ConfigError(f"--length {parsed.length} is too short for --{name} {count}")
    if parsed.output.exists():
        raise ConfigError(f"--output {parsed.output} exists already; give the name of a new folder")
    writable({"--output": parsed.output})


def has_begun(work: Path, *, resume: bool) -> bool:
    """Whether there is a checkpoint to resume. Raises ConfigError if that contradicts `resume`."""
    if not work.exists():
        if resume:
            raise ConfigError(f"nothing to resume: there is no checkpoint in {work}")
        return False
    if (work / "data").is_file():
        if not resume:
            raise ConfigError(f"{work} is of a run that has not ended: --resume continues it")
        return True
    if any(not file.name.startswith(".data.") for file in work.iterdir()):  # it will be deleted
        raise ConfigError(f"{work} is not a folder of a run: give another --output")
    return False


def refuse_another(work: Path, options: dict[str, str]) -> None:
    """Raise ConfigError unless the run was started with these options."""
    begun = load(work / "data")["options"]
    if begun.keys() != options.keys():
        raise ConfigError(f"{work} belongs to another training program: give another --output")
    for name, value in begun.items():
        if options[name] != value:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {options[name]}, and the run was begun with {value}")


def load(path: Path, device: Any = "cpu", use: Callable[[Any], None] = lambda _: None) -> Any:
    """Load a checkpoint file, pass its content to `use`, and return it. Raises ConfigError."""
    try:
        use(content := torch.load(path, map_location=device))
    except (PermissionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from zip, pickle, torch, and `use` if something is missing
        raise ConfigError(
            f"the checkpoint {path} is damaged: delete the folder {path.parent} and start again"
        ) from error
    return content


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint file atomically. Raises ConfigError."""
    with storing(path):
        replace_file(path, lambda part: torch.save(content, part))


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn libraries' errors for a full disk into ConfigError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        reason = one_line(error, 100)
        raise ConfigError(f"cannot write {path}; is the disk full? ({reason})") from error


def collected(parsed: argparse.Namespace, fits: Fits) -> dict[str, Any]:
    """Return the training rows, and the held-out rows by source. Raises EngineError, also if the
    models do not fit each other."""
    config = EngineConfig.model_validate({
        "target": {"path": parsed.target}, "device": parsed.device, "threads": parsed.threads,
        "speculation": {"proposer": {"path": parsed.draft} if parsed.draft else {"kind": "ngram"}},
    })  # fmt: skip
    check_folders(config)
    tokenizer = tokenizer_of(parsed.target)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    texts = {f"--text {path}": [Text(encode(read_text(path)))] for path in parsed.text}
    prompts = read_texts(parsed.prompts, renderer(tokenizer)) if parsed.prompts else []
    pair = load_pair(config)
    if pair.translation is not None:
        what = "has another tokenizer than the target; give one with the same, or --layers"
        raise ConfigError(f"--draft {parsed.draft} {what}")
    if parsed.length > (context := pair.target.max_model_len):
        raise ConfigError(f"--length is {parsed.length}; the target's context has {context} tokens")
    fits(parsed, pair)
    for path in parsed.ids:
        found = [(each.prompt, each.reply) for each in read_ids(path, pair.target.vocab_size)]
        texts[f"--ids {path}"] = [Text(prompt + reply, len(prompt) - 1) for prompt, reply in found]
    seconds = math.inf if parsed.steps else 60 * parsed.minutes * WRITING
    engine, seed = Engine(config, pair=pair), parsed.seed
    write = partial(written, engine, tokens=parsed.reply, seed=seed, seconds=seconds)
    if prompts:
        texts["replies"] = write([encode(text) for text in prompts])
    learn, held = parted(texts, write, parsed)
    some = {n: tuple(rows.pick(slice(None, None, len(rows.ids) // MOST_HELD + 1)))
            for n, rows in held.items() if len(rows.ids)}  # fmt: skip
    return {"learn": tuple(learn), "held": some}


def frozen(parsed: argparse.Namespace) -> Any:
    """Return the frozen target on the training device."""
    device, auto = pick_device(parsed.device), AutoModelForCausalLM
    exact = torch.bfloat16 if device.type == "cuda" else torch.float32
    target: Any = auto.from_pretrained(model_folder(parsed.target, "target"), dtype=exact)
    return target.to(device).eval().requires_grad_(False)


def trained(
    parsed: argparse.Namespace, work: Path, data: Any, model: nn.Module, optimizers: Optimizers,
    learn: Callable[[Rows], float], begin: Callable[[], Any],
) -> tuple[Any, Run]:  # fmt: skip
    """Train from the last checkpoint to the end of the budget. Return the run, after the result of
    `begin`, which initialises and evaluates a model without a checkpoint. Raises ConfigError."""
    run, rows = Run(parsed.minutes, parsed.steps), Rows(*data["learn"])

    def restore(state: Any) -> None:
        model.load_state_dict(state["model"])
        for optimizer, own in zip(optimizers, state["optimizer"], strict=True):
            optimizer.load_state_dict(own)
        run.step, run.seconds = state["step"], state["seconds"]

    if (work / "state").exists():
        before = load(work / "state", rows.ids.device, restore)["before"]
    else:
        before = begin()

    def save() -> None:
        keep(work / "state", {
            "model": model.state_dict(), "optimizer": [each.state_dict() for each in optimizers],
            "before": before, "step": run.step, "seconds": run.seconds,
        })  # fmt: skip

    save()
    stream = batches(rows, ROWS, parsed.seed, run.step)
    fit(learn, optimizers, stream, run, save=save, every=CHECKPOINT)
    save()
    return before, run


def first(parsed: argparse.Namespace, rows: Rows) -> Iterator[Rows]:
    """Yield batches for the initialisation: no row twice, at least one batch, and at most SHARE of
    the steps or minutes."""
    most, until = min(BEGUN, -(-len(rows.ids) // ROWS)), math.inf
    if parsed.steps:
        most = min(most, max(1, int(SHARE * parsed.steps)))
    else:
        until = time.monotonic() + SHARE * 60 * parsed.minutes
    for _, some in zip(range(most), batches(rows, ROWS, parsed.seed), strict=False):
        yield some
        if time.monotonic() > until:
            return


def sentence(parsed: argparse.Namespace, run: Run, kind: str) -> str:
    """Return the run's length and the command that uses the proposer of this kind."""
    named = "" if parsed.target == BUILTIN else f" --target {parsed.target}"
    return (
        f"{run.step} steps in {run.seconds / 60:.1f} minutes; to use it: foredraft serve{named}"
        f" --set speculation.proposer.kind={kind} --set speculation.proposer.path={parsed.output}"
    )
