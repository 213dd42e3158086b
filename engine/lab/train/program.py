"""What all programs of training share: options, data, checkpoints, and the run from the last one.

In the folder of a run that has not ended lie `data`, with the options and all rows, and `state`,
with all that the next step depends on.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.arguments import Parser, exit_code, number, show, whole
from engine.config import BUILTIN, EngineConfig, model_folder
from engine.core import Engine
from engine.errors import ConfigError, one_line
from engine.lab.comparison.prompt_files import read_text, read_texts, renderer
from engine.lab.files import replace_file, writable
from engine.lab.train.data import (
    Rows,
    Text,
    all_of,
    batches,
    passages,
    rows_of,
    split,
    written,
)
from engine.lab.train.loop import Run, Steps, fit, log
from engine.model.checkpoint import quietly
from engine.model.loader import pick_device
from engine.model.pair import Pair, load_pair
from engine.step.id_log import read_ids

ROWS = 8  # of a batch
MOST_HELD = 32  # rows of a source that are measured on
WRITING = 0.25  # of the minutes, at most, for what the target writes
BEGUN, SHARE = 64, 0.25  # batches that the beginning is computed from, and of the run, at most
CHECKPOINT = 60.0  # seconds from one to the next
FREE = {"minutes", "steps", "threads", "nice", "device", "resume"}  # --resume may change them


Train = Callable[[argparse.Namespace, Path, Any, Any], str]
Check = Callable[[argparse.Namespace], None]
Fits = Callable[[argparse.Namespace, Pair], None]


def add_data(parser: Parser, made: str) -> None:
    """The target, what is learnt from and how, and where what is `made` goes."""
    add = parser.add_argument
    add("--target", default=BUILTIN, metavar="MODEL", help="folder or hub name (the built-in one)")
    add("--text", nargs="+", default=[], metavar="FILE", help="text to learn from, UTF-8")
    add("--prompts", metavar="FILE", help="that the target answers")
    add("--ids", nargs="+", default=[], metavar="FILE", help="written by speculation.record_ids")
    add("--output", required=True, type=Path, metavar="DIR", help=f"a new folder, for {made}")
    add("--minutes", type=number(0, 1e6, above=True), default=10, help="of learning (10)")
    add("--steps", type=whole(1, 10**9), metavar="N", help="train for N steps instead of --minutes")
    add("--held-out", type=number(0.001, 0.9), default=0.1, metavar="SHARE", help="(0.1)")
    add("--length", type=whole(16, 1 << 16), default=256, metavar="N", help="tokens of a row (256)")
    add("--reply", type=whole(1, 1 << 16), default=128, metavar="N",
        help="tokens that the target writes at a time, at most (128)")  # fmt: skip
    add("--continued", type=whole(0, 10**6), default=64, metavar="N",
        help="passages that the target goes on with (64)")  # fmt: skip
    add("--seed", type=whole(0, 2**31), default=0, metavar="N", help="of all that is random (0)")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="to learn on (auto)")
    add("--threads", type=whole(1, 1024), default=1, metavar="N", help="(1)")
    add("--nice", type=whole(0, 19), default=10, metavar="N", help="how low the priority is (10)")


def main(
    parser: Parser, arguments: Sequence[str] | None, train: Train,
    check: Check = lambda parsed: None, fits: Fits = lambda parsed, pair: None,
) -> int:  # fmt: skip
    """The exit code. `check` and `fits` may raise ConfigErrors for options, and for a target, that
    contradict each other."""
    parsed = parser.parse_args(arguments)
    vars(parsed).setdefault("draft", None)  # none is needed to write what is learnt from
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    return exit_code(parser.prog, lambda: run(parsed, train, check, fits))


def run(parsed: argparse.Namespace, train: Train, check: Check, fits: Fits) -> int:
    """Collect data, and `train`, given the options, the folder, the target and the data: it writes
    what is made and answers a report; the exit code. Raises EngineError."""
    check(parsed)
    refuse_data(parsed)
    work = parsed.output.with_name(parsed.output.name + ".training")
    said = {name: str(value) for name, value in vars(parsed).items() if name not in FREE}
    begun = has_begun(work, resume=parsed.resume)
    if begun:
        refuse_another(work, said)
    os.nice(parsed.nice)
    torch.set_num_threads(parsed.threads)
    torch.set_flush_denormal(True)
    try:
        with quietly():
            if not begun:
                data = collected(parsed, fits)
                work.mkdir(exist_ok=True)
                keep(work / "data", {"options": said, **data})
            target = frozen(parsed)
            words = train(parsed, work, target, load(work / "data", target.device))
    finally:
        torch.set_flush_denormal(False)  # it is the thread's, not this function's
    shutil.rmtree(work, ignore_errors=True)
    return show(words)


def refuse_data(parsed: argparse.Namespace) -> None:
    """Raises ConfigError where nothing is given to learn from, or nowhere to write to."""
    if not (parsed.text or parsed.ids or parsed.prompts):
        raise ConfigError("there is nothing to learn from: give --text, --prompts or --ids")
    if parsed.output.exists():
        raise ConfigError(f"--output {parsed.output} exists already; give the name of a new folder")
    writable({"--output": parsed.output})


def has_begun(work: Path, *, resume: bool) -> bool:
    """Whether there is a checkpoint, if so to be gone on with. Raises ConfigError."""
    if not work.exists():
        if resume:
            raise ConfigError(f"nothing to resume: there is no checkpoint in {work}")
        return False
    if (work / "data").is_file():
        if not resume:
            raise ConfigError(f"{work} is of a run that has not ended: --resume goes on with it")
        return True
    if any(not file.name.startswith(".data.") for file in work.iterdir()):  # it will be deleted
        raise ConfigError(f"{work} is no folder of a run: give another --output")
    return False


def refuse_another(work: Path, said: dict[str, str]) -> None:
    """Raises ConfigError unless the run is of these options."""
    begun = load(work / "data")["options"]
    if begun.keys() != said.keys():
        raise ConfigError(f"{work} is of another program of training: give another --output")
    for name, value in begun.items():
        if said[name] != value:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {said[name]}, and the run was begun with {value}")


def load(path: Path, device: Any = "cpu", use: Callable[[Any], None] = lambda said: None) -> Any:
    """Of a checkpoint, as it is kept, once `use` has taken it. Raises ConfigError."""
    try:
        use(said := torch.load(path, map_location=device))
    except (PermissionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of zip, pickle and torch, and of what is not in there
        raise ConfigError(
            f"the checkpoint {path} is damaged: delete the folder {path.parent} and begin anew"
        ) from error
    return said


def keep(path: Path, content: dict[str, Any]) -> None:
    """Of a checkpoint, whole or not at all. Raises ConfigError."""
    with storing(path):
        replace_file(path, lambda part: torch.save(content, part))


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """What libraries make of a full disk, as a ConfigError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        reason = one_line(error, 100)
        raise ConfigError(f"cannot write {path}; is the disk full? ({reason})") from error


def collected(parsed: argparse.Namespace, fits: Fits) -> dict[str, Any]:
    """Rows to learn from, and held out by source. Raises EngineError, also for models that do not
    fit each other."""
    config = EngineConfig.model_validate({
        "target": {"path": parsed.target}, "device": parsed.device, "threads": parsed.threads,
        "speculation": {"proposer": {"path": parsed.draft} if parsed.draft else {"kind": "ngram"}},
    })  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(parsed.target, "target"))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    texts = {path: [Text(encode(read_text(path)))] for path in parsed.text}
    asked = read_texts(parsed.prompts, renderer(tokenizer)) if parsed.prompts else []
    prompts = [encode(text) for text in asked]
    pair = load_pair(config)
    if pair.translation is not None:
        what = "has another tokenizer than the target; give one with the same, or --layers"
        raise ConfigError(f"--draft {parsed.draft} {what}")
    fits(parsed, pair)
    for path in parsed.ids:
        found = read_ids(path, pair.target.vocab_size)
        texts[path] = [Text(each.prompt + each.reply, len(each.prompt) - 1) for each in found]
    seconds = math.inf if parsed.steps else 60 * parsed.minutes * WRITING
    write = partial(written, Engine(config, pair=pair), tokens=parsed.reply, seed=parsed.seed)
    if prompts:
        texts["replies"] = write(prompts, seconds=seconds)
    parts = {n: split(rows_of(text, parsed.length), parsed.held_out) for n, text in texts.items()}
    if not any(len(held.ids) for _, held in parts.values()):
        raise ConfigError("too short to learn from and to hold some of it out: nothing fills two"
                          f" rows of --length {parsed.length} tokens")  # fmt: skip
    if parsed.continued:
        own = write(passages(joined(parts), parsed.continued, parsed.seed), seconds=seconds)
        learn, held_own = split(rows_of(own, parsed.length), parsed.held_out)
        again = max(1, len(joined(parts).ids) // max(1, len(learn.ids)))  # as much as of the rest
        parts["the target's own"] = learn.pick(torch.arange(len(learn.ids)).repeat(again)), held_own
    held = {n: tuple(rows.pick(slice(None, None, len(rows.ids) // MOST_HELD + 1)))
            for n, (_, rows) in parts.items() if len(rows.ids)}  # fmt: skip
    return {"learn": tuple(joined(parts)), "held": held}


def joined(parts: dict[str, tuple[Rows, Rows]]) -> Rows:
    """All that is to be learnt from."""
    return all_of({name: learn for name, (learn, _) in parts.items()})


def frozen(parsed: argparse.Namespace) -> Any:
    """The target, on the device to learn on."""
    device, auto = pick_device(parsed.device), AutoModelForCausalLM
    exact = torch.bfloat16 if device.type == "cuda" else torch.float32
    target: Any = auto.from_pretrained(model_folder(parsed.target, "target"), dtype=exact)
    return target.to(device).eval().requires_grad_(False)


def trained(
    parsed: argparse.Namespace, work: Path, data: Any, model: nn.Module, optimizer: Steps,
    learn: Callable[[Rows], float], begin: Callable[[], Any],
) -> tuple[Any, Run]:  # fmt: skip
    """From the last checkpoint to the end of the budget: what `begin`, called where there is none,
    said of the model before, and the run. Raises ConfigError."""
    run, rows = Run(parsed.minutes, parsed.steps), Rows(*data["learn"])

    def restore(said: Any) -> None:
        model.load_state_dict(said["model"])
        optimizer.restore(said["optimizer"])
        run.step, run.seconds = said["step"], said["seconds"]

    if (work / "state").exists():
        before = load(work / "state", rows.ids.device, restore)["before"]
    else:
        before = begin()

    def save() -> None:
        keep(work / "state", {
            "model": model.state_dict(), "optimizer": optimizer.state(), "before": before,
            "step": run.step, "seconds": run.seconds,
        })  # fmt: skip

    save()
    stream = batches(rows, ROWS, parsed.seed, run.step)
    fit(learn, optimizer, stream, run, save=save, every=CHECKPOINT)
    save()
    return before, run


def first(parsed: argparse.Namespace, rows: Rows) -> Iterator[Rows]:
    """Batches to begin with: no row twice, and no more than SHARE of the steps or of the minutes,
    but one."""
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
    """What was done, and what to do with a proposer of that kind."""
    named = "" if parsed.target == BUILTIN else f" --target {parsed.target}"
    return (
        f"{run.step} steps in {run.seconds / 60:.1f} minutes; to use it: foredraft serve{named}"
        f" --set speculation.proposer.kind={kind} --set speculation.proposer.path={parsed.output}"
    )
