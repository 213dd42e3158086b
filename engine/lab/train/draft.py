"""Distils a draft for a target on your own data, so that it guesses the target's tokens more often.

    foredraft train draft --text notes.sql --output mine
    foredraft serve --draft mine

It starts from --draft (the built-in one, for the built-in target) or from a new, small Llama of
--layers and --width. It learns from --text, from what the target answers to --prompts, from the
requests that a server recorded (--ids, see speculation.record_ids), and from passages of the text
that the target goes on with itself. A tenth is held out; how often draft and target agree there is
printed as it was before and as it is after. Nothing is learnt by the target.

It is polite to a server on the same machine: one thread, a low priority. Stopped or killed, it goes
on from its last checkpoint with --resume and the same options.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.arguments import Parser, exit_code, number, whole
from engine.config import BUILTIN, EngineConfig, model_folder
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.files import new_folder
from engine.lab.train.agreement import Agreement, of_all, report
from engine.lab.train.data import Rows, Text, batches, joined, of_file, of_log, rows_of, split
from engine.lab.train.learning import HEAD_SIZE, Optimizer, follow, llama
from engine.lab.train.loop import Budget, Checkpoint, Progress, fit
from engine.lab.train.writing import passages, prompts_in, written
from engine.model.checkpoint import quietly
from engine.model.loader import pick_device
from engine.model.pair import load_pair

ROWS = 8  # of a batch
MOST_HELD = 32  # rows of a source that are measured on
WRITING = 0.25  # of the minutes, at most, for the target's own text
FREE = {"minutes", "steps", "threads", "nice", "checkpoint", "device", "resume"}  # may differ

log = logging.getLogger("foredraft.train")


def build_parser() -> Parser:
    parser = Parser("foredraft train draft", __doc__)
    add = parser.add_argument
    add("--target", default=BUILTIN, metavar="MODEL", help="folder or hub name (the built-in one)")
    add("--draft", metavar="MODEL", help="to start from; with the built-in target the built-in one")
    add("--layers", type=whole(1, 1000), metavar="N", help="of a new draft, instead (1)")
    add("--width", type=whole(HEAD_SIZE, 1 << 14), metavar="N", help="of a new draft (256)")
    add("--text", nargs="+", default=[], metavar="FILE", help="text to learn from, UTF-8")
    add("--prompts", metavar="FILE", help="that the target answers: one a line, or *.jsonl")
    add("--ids", nargs="+", default=[], metavar="FILE", help="written by speculation.record_ids")
    add("--output", required=True, type=Path, metavar="DIR", help="a new folder, for the draft")
    add("--minutes", type=number(0, 1e6, above=True), default=10, help="of learning (10)")
    add("--steps", type=whole(1, 10**9), metavar="N", help="instead: so many, whatever they take")
    add("--held-out", type=number(0.001, 0.9), default=0.1, metavar="SHARE", help="(0.1)")
    add("--length", type=whole(16, 1 << 16), default=256, metavar="N", help="tokens of a row (256)")
    add("--reply", type=whole(1, 1 << 16), default=128, metavar="N",
        help="tokens that the target writes at a time, at most (128)")  # fmt: skip
    add("--continued", type=whole(0, 10**6), default=64, metavar="N",
        help="passages of the text that it goes on with (64)")  # fmt: skip
    add("--rate", type=number(0, 10, above=True), default=0.5, help="scales learning rates (0.5)")
    add("--seed", type=whole(0, 2**31), default=0, metavar="N", help="of all that is random (0)")
    add("--checkpoint", type=number(0), default=60, metavar="SECONDS", help="between two (60)")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="to learn on")
    add("--threads", type=whole(1, 1024), default=1, metavar="N", help="(1)")
    add("--nice", type=whole(0, 19), default=10, metavar="N", help="how low the priority is (10)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(logging.INFO)
    return exit_code(parser.prog, lambda: run(parsed))


def run(parsed: argparse.Namespace) -> int:
    """Collect data, learn, report, write; the exit code. Raises EngineError."""
    check(parsed)
    state = Checkpoint(parsed.output.with_name(parsed.output.name + ".training"))
    said = {name: str(value) for name, value in vars(parsed).items() if name not in FREE}
    if parsed.resume:
        refuse_another(state, said)
    elif state.folder.exists():
        raise ConfigError(
            f"{state.folder} is of a run that has not ended: --resume goes on with it"
        )
    os.nice(parsed.nice)
    torch.set_num_threads(parsed.threads)
    torch.set_flush_denormal(True)
    with quietly():
        if not parsed.resume:
            data = collected(parsed)
            state.folder.mkdir()
            state.write("data", {"options": said, **data})
        try:
            train(parsed, state)
        except KeyboardInterrupt:
            log.info("stopped; the same command with --resume goes on")
            raise
    shutil.rmtree(state.folder, ignore_errors=True)
    return 0


def check(parsed: argparse.Namespace) -> None:
    """Fill in what is the draft. Raises ConfigError for options that contradict each other."""
    new = parsed.layers is not None or parsed.width is not None
    if new and parsed.draft is not None:
        raise ConfigError("--layers and --width are of a new draft, --draft names one there is")
    if new:
        parsed.layers, parsed.width = parsed.layers or 1, parsed.width or 256
        if parsed.width % HEAD_SIZE:
            raise ConfigError(f"--width is {parsed.width}; it must be a multiple of {HEAD_SIZE}")
    elif parsed.draft is None:
        if parsed.target != BUILTIN:
            raise ConfigError("for this --target give --draft, or --layers for a new one")
        parsed.draft = BUILTIN
    if not (parsed.text or parsed.ids or parsed.prompts):
        raise ConfigError("there is nothing to learn from: give --text, --prompts or --ids")
    if parsed.output.exists():
        raise ConfigError(f"--output {parsed.output} exists already; give the name of a new folder")
    if not parsed.output.parent.is_dir():
        raise ConfigError(f"--output {parsed.output} cannot be made: its folder is not there")


def refuse_another(state: Checkpoint, said: dict[str, str]) -> None:
    """Raises ConfigError unless there is a run of these options."""
    if not state.has("data"):
        raise ConfigError(f"nothing to resume: there is no checkpoint in {state.folder}")
    for name, value in state.read("data")["options"].items():
        if said.get(name) != value:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {said.get(name)}, but the run that --resume goes on"
                f" with was begun with {value}"
            )


def collected(parsed: argparse.Namespace) -> dict[str, Any]:
    """Rows to learn from, and held out by source. Raises EngineError, also for models that do not
    fit each other."""
    proposer = {"path": parsed.draft} if parsed.draft else {"kind": "ngram"}
    config = EngineConfig.model_validate({
        "target": {"path": parsed.target}, "device": parsed.device, "threads": parsed.threads,
        "speculation": {"proposer": proposer},
    })  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(parsed.target, "target"))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    texts = {path: of_file(path, encode) for path in parsed.text}
    prompts = prompts_in(parsed.prompts, tokenizer, encode) if parsed.prompts else []
    pair = load_pair(config)
    texts |= {path: of_log(path, pair.target.vocab_size) for path in parsed.ids}
    engine = Engine(config, pair=pair)
    write = partial(written, engine, tokens=parsed.reply, seed=parsed.seed,
                    seconds=60 * parsed.minutes * WRITING)  # fmt: skip
    if prompts:
        texts["replies"] = write(prompts)
    parts = {name: parted(text, parsed) for name, text in texts.items()}
    if not any(len(held.ids) for _, held in parts.values()):
        raise ConfigError("too short to learn from and to hold some of it out: nothing fills two"
                          f" rows of --length {parsed.length} tokens")  # fmt: skip
    learn = joined([rows for rows, _ in parts.values()])
    if parsed.continued:
        own = write(passages(learn, parsed.continued, parsed.seed))
        parts["the target's own"] = parted(own, parsed)
    learn = joined([rows for rows, _ in parts.values()])
    held = {name: tuple(rows) for name, (_, rows) in parts.items() if len(rows.ids)}
    return {"learn": tuple(learn), "held": held}


def parted(texts: list[Text], parsed: argparse.Namespace) -> tuple[Rows, Rows]:
    """Rows to learn from, and those that are measured on."""
    learn, held = split(rows_of(texts, parsed.length), parsed.held_out)
    return learn, held.pick(slice(None, None, len(held.ids) // MOST_HELD + 1))


def models(parsed: argparse.Namespace) -> tuple[Any, Any, torch.dtype]:
    """The target, the draft to start from in float32, and in what it will be written."""
    device = pick_device(parsed.device)
    exact = torch.bfloat16 if device.type == "cuda" else torch.float32
    auto: Any = AutoModelForCausalLM
    source = model_folder(parsed.target, "target")
    target = auto.from_pretrained(source, dtype=exact).to(device).eval().requires_grad_(False)
    stored = source if parsed.draft is None else model_folder(parsed.draft, "draft")
    kind = getattr(AutoConfig.from_pretrained(stored), "dtype", None) or torch.float32
    if parsed.draft is not None:
        return target, auto.from_pretrained(stored, dtype=torch.float32).to(device).eval(), kind
    torch.manual_seed(parsed.seed)
    of = target.config
    draft = llama(
        parsed.width, 3 * parsed.width, parsed.layers,
        vocabulary=target.get_output_embeddings().weight.shape[0],
        max_position_embeddings=of.max_position_embeddings,
        eos_token_id=of.eos_token_id, pad_token_id=of.pad_token_id,
    )  # fmt: skip
    return target, draft.to(device).eval(), kind


def train(parsed: argparse.Namespace, state: Checkpoint) -> None:
    """From the last checkpoint to the report. Raises ConfigError, and KeyboardInterrupt when it was
    asked to stop."""
    target, draft, kind = models(parsed)
    data = state.read("data")
    learn = Rows(*(part.to(target.device) for part in data["learn"]))
    held = {name: Rows(*(part.to(target.device) for part in rows))
            for name, rows in data["held"].items()}  # fmt: skip
    optimizer, progress = Optimizer(draft, scale=parsed.rate), Progress()
    if state.has("state"):
        said = state.read("state")
        draft.load_state_dict(said["draft"])
        optimizer.restore(said["optimizer"])
        progress = Progress(said["step"], said["seconds"])
        before = {name: Agreement(*each) for name, each in said["before"].items()}
    else:
        before = of_all(target, draft, held)

    def save(progress: Progress) -> None:
        state.write("state", {
            "draft": draft.state_dict(), "optimizer": optimizer.state(), "step": progress.step,
            "seconds": progress.seconds, "before": {n: tuple(each) for n, each in before.items()},
        })  # fmt: skip

    save(progress)
    fit(
        lambda batch: follow(target, draft, *batch), optimizer,
        batches(learn, ROWS, parsed.seed, progress.step), Budget(parsed.minutes, parsed.steps),
        progress=progress, save=save, every=parsed.checkpoint,
    )  # fmt: skip
    save(progress)
    after = of_all(target, draft.to(kind).float(), held)
    with new_folder(parsed.output) as folder:
        draft.to(kind).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_folder(parsed.target, "target")).save_pretrained(folder)
    print(report(before, after))
    print(sentence(parsed, before["all"], after["all"], progress))


def sentence(parsed: argparse.Namespace, old: Agreement, new: Agreement, progress: Progress) -> str:
    """What came of it, and what to do."""
    gain = new.sampled - old.sampled
    moved = "rose" if gain > 0.0005 else "fell" if gain < -0.0005 else "stayed"
    named = "" if parsed.target == BUILTIN else f" --target {parsed.target}"
    return (
        f"in {progress.step} steps and {progress.seconds / 60:.1f} minutes agreement on held-out"
        f" text {moved} from {old.sampled:.3f} to {new.sampled:.3f} at temperature 1, from"
        f" {old.greedy:.3f} to {new.greedy:.3f} at 0; to use it:"
        f" foredraft serve{named} --draft {parsed.output}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
