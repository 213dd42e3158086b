"""Distils a draft for a target on your own data, for a higher acceptance.

    foredraft train draft --text notes.sql --output mine
    foredraft serve --draft mine

It starts from --draft (the built-in one, for the built-in target) or from a new, small Llama of
--layers and --width. Prints the agreement of draft and target on held-out text, before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.arguments import Parser, whole
from engine.config import BUILTIN, model_folder
from engine.errors import ConfigError
from engine.lab.bench.options import tokenizer_of
from engine.lab.files import new_folder
from engine.lab.train import program
from engine.lab.train.agreement import ALL, Agreement, agreement, report
from engine.lab.train.data import Rows
from engine.lab.train.learning import HEAD_SIZE, Run, follow, llama, optimizers_of
from engine.lab.train.program import parser_of, storing, trained

RATE = 0.5  # factor on the full learning rates of `optimizers_of`


def build_parser() -> Parser:
    parser = parser_of("draft", __doc__, "the draft")
    add = parser.add_argument
    add("--draft", metavar="MODEL", help="to start from; with the built-in target the built-in one")
    add("--layers", type=whole(1, 1000), metavar="N", help="of a new draft, instead")
    add("--width", type=whole(1, 1 << 14), metavar="N", help="of a new draft (256)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    return program.main(build_parser(), arguments, train, check)


def check(parsed: argparse.Namespace) -> None:
    """Fill in defaults of the draft's options. Raises ConfigError if options contradict."""
    if parsed.layers is None and parsed.draft is None:
        if parsed.target != BUILTIN:
            raise ConfigError("for this --target give --draft, or --layers for a new one")
        parsed.draft = BUILTIN
    if parsed.layers is not None and parsed.draft is not None:
        raise ConfigError("--layers is of a new draft, --draft names one there is")
    if parsed.layers is None and parsed.width is not None:
        raise ConfigError("--width is of a new draft: give --layers, too")
    parsed.width = parsed.width or 256
    if parsed.width % HEAD_SIZE:
        raise ConfigError(f"--width is {parsed.width}; it must be a multiple of {HEAD_SIZE}")


def beginning(parsed: argparse.Namespace, target: Any) -> tuple[Any, torch.dtype]:
    """Return the draft to start from, in float32, and the dtype in which it will be saved."""
    auto: Any = AutoModelForCausalLM
    if parsed.draft is not None:
        stored = model_folder(parsed.draft, "draft")
        draft = auto.from_pretrained(stored, dtype=torch.float32)
    else:
        stored, of = model_folder(parsed.target, "target"), target.config
        torch.manual_seed(parsed.seed)
        draft = llama(
            parsed.width, 3 * parsed.width, parsed.layers,
            vocabulary=target.get_output_embeddings().weight.shape[0],
            max_position_embeddings=of.max_position_embeddings,
            eos_token_id=of.eos_token_id, pad_token_id=of.pad_token_id,
        )  # fmt: skip
    kind = getattr(AutoConfig.from_pretrained(stored), "dtype", None) or torch.float32
    return draft.to(target.device).eval(), kind


def train(parsed: argparse.Namespace, work: Path, target: Any, data: Any) -> str:
    """Train from the last checkpoint, save, and return the report. Raises ConfigError."""
    draft, kind = beginning(parsed, target)
    held = {name: Rows(*rows) for name, rows in data["held"].items()}
    before, run = trained(
        parsed, work, data, draft, optimizers_of(draft, scale=RATE),
        lambda batch: follow(target, draft, *batch), lambda: agreement(target, draft, held),
    )  # fmt: skip
    after = agreement(target, draft.to(kind).float(), held)
    with storing(parsed.output), new_folder(parsed.output) as folder:
        draft.to(kind).save_pretrained(folder)
        tokenizer_of(parsed.target).save_pretrained(folder)
    return f"{report(held, before, after)}\n{sentence(parsed, before[ALL], after[ALL], run)}"


def sentence(parsed: argparse.Namespace, old: Agreement, new: Agreement, run: Run) -> str:
    """Return the result in a sentence, with the command that uses the draft."""
    both = f"{old[1]:.3f}", f"{new[1]:.3f}"
    moved = "did not change" if both[0] == both[1] else "rose" if new[1] > old[1] else "fell"
    named = "" if parsed.target == BUILTIN else f" --target {parsed.target}"
    return (
        f"in {run.step} steps and {run.seconds / 60:.1f} minutes agreement on held-out text"
        f" {moved}, {' to '.join(both)} at temperature 1, {old[0]:.3f} to {new[0]:.3f}"
        f" at 0; to use it: foredraft serve{named} --draft {parsed.output}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
