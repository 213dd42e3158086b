"""Distils a draft for a target on your own data, so that it guesses the target's tokens more often.

    foredraft train draft --text notes.sql --output mine
    foredraft serve --draft mine

It starts from --draft (the built-in one, for the built-in target) or from a new, small Llama of
--layers and --width. It learns from --text, from what the target answers to --prompts, from the
requests that a server recorded (--ids, see speculation.record_ids), and from passages of all these
that the target goes on with itself. A tenth is held out; how often draft and target agree there is
printed as it was before and as it is after. The target stays as it is.

It is polite to a server on the same machine: one thread, a low priority. Stopped or killed, it goes
on from its last checkpoint, every minute, with --resume and the same options.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.arguments import Parser, exit_code, number, show, whole
from engine.config import BUILTIN, EngineConfig, model_folder
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.files import new_folder, replace_file
from engine.lab.train.agreement import ALL, Agreement, agreement, report
from engine.lab.train.data import (
    Rows,
    Text,
    batches,
    passages,
    prompts_in,
    read_text,
    rows_of,
    split,
    written,
)
from engine.lab.train.learning import HEAD_SIZE, Optimizer, follow, llama
from engine.lab.train.loop import Run, fit, log
from engine.model.checkpoint import quietly
from engine.model.loader import pick_device
from engine.model.pair import load_pair
from engine.step.id_log import read_ids

ROWS = 8  # of a batch
MOST_HELD = 32  # rows of a source that are measured on
WRITING = 0.25  # of the minutes, at most, for what the target writes
RATE = 0.5  # of the learning rates that the built-in pair began with
CHECKPOINT = 60.0  # seconds from one to the next
FREE = {"minutes", "steps", "threads", "nice", "device", "resume"}  # --resume may change them


def build_parser() -> Parser:
    parser = Parser("foredraft train draft", __doc__)
    add = parser.add_argument
    add("--draft", metavar="MODEL", help="to start from; with the built-in target the built-in one")
    add("--layers", type=whole(1, 1000), metavar="N", help="of a new draft, instead")
    add("--width", type=whole(1, 1 << 14), default=256, metavar="N", help="of a new draft (256)")
    add_data(parser, "the draft")
    return parser


def add_data(parser: Parser, made: str) -> None:
    """The target, what is learnt from and how, and where what is `made` goes."""
    add = parser.add_argument
    add("--target", default=BUILTIN, metavar="MODEL", help="folder or hub name (the built-in one)")
    add("--text", nargs="+", default=[], metavar="FILE", help="text to learn from, UTF-8")
    add("--prompts", metavar="FILE", help="that the target answers: one a line, or *.jsonl")
    add("--ids", nargs="+", default=[], metavar="FILE", help="written by speculation.record_ids")
    add("--output", required=True, type=Path, metavar="DIR", help=f"a new folder, for {made}")
    add("--minutes", type=number(0, 1e6, above=True), default=10, help="of learning (10)")
    add("--steps", type=whole(1, 10**9), metavar="N", help="instead: so many, whatever they take")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    return exit_code(parser.prog, lambda: run(check(parsed), train))


def run(parsed: argparse.Namespace, train: Callable[[argparse.Namespace, Path], str]) -> int:
    """Collect data, `train` on it, which writes what is made and answers a report; the exit code.
    Raises EngineError."""
    refuse_data(parsed)
    work = parsed.output.with_name(parsed.output.name + ".training")
    said = {name: str(value) for name, value in vars(parsed).items() if name not in FREE}
    if not parsed.resume and work.exists():
        raise ConfigError(f"{work} is of a run that has not ended: --resume goes on with it")
    if parsed.resume:
        refuse_another(work, said)
    os.nice(parsed.nice)
    torch.set_num_threads(parsed.threads)
    torch.set_flush_denormal(True)
    with quietly():
        if not parsed.resume:
            data = collected(parsed)
            work.mkdir()
            keep(work / "data", {"options": said, **data})
        words = train(parsed, work)
    shutil.rmtree(work, ignore_errors=True)
    return show(words)


def check(parsed: argparse.Namespace) -> argparse.Namespace:
    """With the draft filled in. Raises ConfigError for options that contradict each other."""
    if parsed.layers is None and parsed.draft is None:
        if parsed.target != BUILTIN:
            raise ConfigError("for this --target give --draft, or --layers for a new one")
        parsed.draft = BUILTIN
    if parsed.layers is not None and parsed.draft is not None:
        raise ConfigError("--layers is of a new draft, --draft names one there is")
    if parsed.width % HEAD_SIZE:
        raise ConfigError(f"--width is {parsed.width}; it must be a multiple of {HEAD_SIZE}")
    return parsed


def refuse_data(parsed: argparse.Namespace) -> None:
    """Raises ConfigError where nothing is given to learn from, or nowhere to write to."""
    if not (parsed.text or parsed.ids or parsed.prompts):
        raise ConfigError("there is nothing to learn from: give --text, --prompts or --ids")
    if parsed.output.exists():
        raise ConfigError(f"--output {parsed.output} exists already; give the name of a new folder")
    if not parsed.output.parent.is_dir():
        raise ConfigError(f"--output {parsed.output} cannot be made: its folder is not there")


def refuse_another(work: Path, said: dict[str, str]) -> None:
    """Raises ConfigError unless there is a run of these options."""
    if not (work / "data").is_file():
        raise ConfigError(f"nothing to resume: there is no checkpoint in {work}")
    for name, value in torch.load(work / "data")["options"].items():
        if said[name] != value:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {said[name]}, and the run was begun with {value}")


def keep(path: Path, content: dict[str, Any]) -> None:
    """Of a checkpoint, whole or not at all. Raises ConfigError."""
    replace_file(path, lambda part: torch.save(content, part))


def collected(parsed: argparse.Namespace) -> dict[str, Any]:
    """Rows to learn from, and held out by source. Raises EngineError, also for models that do not
    fit each other."""
    config = EngineConfig.model_validate({
        "target": {"path": parsed.target}, "device": parsed.device, "threads": parsed.threads,
        "speculation": {"proposer": {"path": parsed.draft} if parsed.draft else {"kind": "ngram"}},
    })  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(parsed.target, "target"))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    texts = {path: [Text(encode(read_text(path)))] for path in parsed.text}
    prompts = prompts_in(parsed.prompts, tokenizer, encode) if parsed.prompts else []
    pair = load_pair(config)
    for path in parsed.ids:
        found = read_ids(path, pair.target.vocab_size)
        texts[path] = [Text(each.prompt + each.reply, len(each.prompt) - 1) for each in found]
    seconds = 60 * parsed.minutes * WRITING
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
    ids, counted = zip(*(learn for learn, _ in parts.values()), strict=True)
    return Rows(torch.cat(ids), torch.cat(counted))


def models(parsed: argparse.Namespace) -> tuple[Any, Any, torch.dtype]:
    """The target, the draft to start from in float32, and in what it will be written."""
    device, auto = pick_device(parsed.device), AutoModelForCausalLM
    exact = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = model_folder(parsed.target, "target")
    target: Any = auto.from_pretrained(source, dtype=exact)
    draft: Any
    target.to(device).eval().requires_grad_(False)
    if parsed.draft is not None:
        stored = model_folder(parsed.draft, "draft")
        draft = auto.from_pretrained(stored, dtype=torch.float32)
    else:
        stored, of = source, target.config
        torch.manual_seed(parsed.seed)
        draft = llama(
            parsed.width, 3 * parsed.width, parsed.layers,
            vocabulary=target.get_output_embeddings().weight.shape[0],
            max_position_embeddings=of.max_position_embeddings,
            eos_token_id=of.eos_token_id, pad_token_id=of.pad_token_id,
        )  # fmt: skip
    kind = getattr(AutoConfig.from_pretrained(stored), "dtype", None) or torch.float32
    return target, draft.to(device).eval(), kind


def train(parsed: argparse.Namespace, work: Path) -> str:
    """From the last checkpoint to the report, which is answered. Raises ConfigError."""
    target, draft, kind = models(parsed)
    data = torch.load(work / "data", map_location=target.device)
    held = {name: Rows(*rows) for name, rows in data["held"].items()}
    optimizer, run = Optimizer(draft, scale=RATE), Run(parsed.minutes, parsed.steps)
    if (work / "state").is_file():
        said = torch.load(work / "state", map_location=target.device)
        draft.load_state_dict(said["draft"])
        optimizer.restore(said["optimizer"])
        run.step, run.seconds, before = said["step"], said["seconds"], said["before"]
    else:
        before = agreement(target, draft, held)

    def save() -> None:
        keep(work / "state", {
            "draft": draft.state_dict(), "optimizer": optimizer.state(), "before": before,
            "step": run.step, "seconds": run.seconds,
        })  # fmt: skip

    save()
    stream = batches(Rows(*data["learn"]), ROWS, parsed.seed, run.step)
    fit(lambda batch: follow(target, draft, *batch), optimizer, stream, run,
        save=save, every=CHECKPOINT)  # fmt: skip
    save()
    after = agreement(target, draft.to(kind).float(), held)
    with new_folder(parsed.output) as folder:
        draft.to(kind).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_folder(parsed.target, "target")).save_pretrained(folder)
    return f"{report(held, before, after)}\n{sentence(parsed, before[ALL], after[ALL], run)}"


def sentence(parsed: argparse.Namespace, old: Agreement, new: Agreement, run: Run) -> str:
    """What came of it, and what to do."""
    moved = "rose" if new[1] > old[1] else "did not rise"
    named = "" if parsed.target == BUILTIN else f" --target {parsed.target}"
    return (
        f"in {run.step} steps and {run.seconds / 60:.1f} minutes agreement on held-out text"
        f" {moved}, {old[1]:.3f} to {new[1]:.3f} at temperature 1, {old[0]:.3f} to {new[0]:.3f}"
        f" at 0; to use it: foredraft serve{named} --draft {parsed.output}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
