"""`python -m engine.synthetic`: write a random target and a draft that agrees with it as often as
asked, as two folders that `foretoken serve --target DIR/target --draft DIR/draft` takes.

Acceptance is the mean of that at temperature 0 and at 1. Prints a table while it looks for the
scale, then what the pair does on other texts, and writes it. The same arguments give the same
weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from engine.arguments import Parser
from engine.config import BUILTIN, model_folder
from engine.synthetic.calibrate import Agreement, Text, find_scale
from engine.synthetic.weights import POSITIONS, Shape, Whisper, draft_of, random_target, shape_of
from engine.threads import VARIABLES, engine_threads, granted_cores

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHECKS = 3  # other texts, after the scale was found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for arguments that cannot be honoured."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    try:
        shape = shape_of(parsed.parameters, parsed.positions)
        refuse(parsed, shape)
    except ValueError as error:
        parser.error(str(error))
    if VARIABLES[0] not in os.environ:
        torch.set_num_threads(engine_threads(granted_cores()))
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    write(parsed, shape)
    return 0


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m engine.synthetic",
        description=__doc__,
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--parameters", type=float, default=0.3e9, help="of the target, about")
    parser.add_argument("--positions", type=int, default=POSITIONS, help="of the longest sequence")
    parser.add_argument("--draft-layers", type=int, default=1, help="how many the draft shares")
    parser.add_argument("--acceptance", type=float, default=0.8, help="wanted, 0.05 to 0.99")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=768, help="of text to measure acceptance on")
    return parser


def refuse(parsed: argparse.Namespace, shape: Shape) -> None:
    """Raises ValueError with one sentence."""
    if not 0.05 <= parsed.acceptance <= 0.99:
        raise ValueError(f"acceptance is {parsed.acceptance:g}; allowed are 0.05 to 0.99")
    if not 1 <= parsed.draft_layers < shape.layers:
        raise ValueError(
            f"draft-layers is {parsed.draft_layers}; the target has {shape.layers} layers, so "
            f"allowed are 1 to {shape.layers - 1}"
        )
    if not 0 <= parsed.seed < 1 << 63:
        raise ValueError(f"seed is {parsed.seed}; allowed are 0 to 2^63 - 1")
    if not 128 <= parsed.tokens <= 1 << 16:
        raise ValueError(f"tokens is {parsed.tokens}; allowed are 128 to {1 << 16}")
    if parsed.output.exists():
        raise ValueError(f"output {str(parsed.output)!r} exists; name a folder that does not")


def write(parsed: argparse.Namespace, shape: Shape) -> None:
    """Build, calibrate, check, save."""
    layers, seed = parsed.draft_layers, parsed.seed
    print(
        f"target {shape.parameters(shape.layers) / 1e6:.1f} M parameters, {shape.layers} layers of "
        f"width {shape.width}; draft {shape.parameters(layers) / 1e6:.1f} M, {layers} of them",
        flush=True,
    )
    target = random_target(shape, seed)
    draft = draft_of(target, layers)
    whisper = Whisper(target, layers)
    text = text_of(draft, parsed.tokens, seed)

    def measure(scale: float) -> Agreement:
        whisper.set(scale)
        return text.agreement(target)

    print("  scale     T=0    T=1   mean", flush=True)
    scale = find_scale(parsed.acceptance, measure, lambda s, found: row(f"{s:.5f}", found))
    whisper.set(scale)
    print(f"scale {scale:.5f}; on other texts:")
    for other in range(seed + 1, seed + 1 + CHECKS):
        row(f"text {other}", text_of(draft, parsed.tokens, other).agreement(target))
    save(parsed.output, {"target": target, "draft": draft}, getattr(torch, parsed.dtype))
    print(f"written: {parsed.output / 'target'} and {parsed.output / 'draft'}")


def text_of(draft: Any, tokens: int, seed: int) -> Text:
    return Text(draft, sequences=max(1, tokens // 128), length=128, seed=seed)


def row(name: str, found: Agreement) -> None:
    print(f"{name:>9}  {found.greedy:.3f}  {found.sampled:.3f}  {found.mean:.3f}", flush=True)


def save(folder: Path, models: dict[str, Any], dtype: torch.dtype) -> None:
    """Both models, which are of that type then, with the built-in pair's tokenizer, whole or not at
    all."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for role, model in models.items():
        model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=[0, 2])  # type: ignore[no-untyped-call]
        model.to(dtype).save_pretrained(fresh / role)  # its config.json says the model's type
        for name in TOKENIZER:
            shutil.copyfile(Path(model_folder(BUILTIN, "target"), name), fresh / role / name)
    fresh.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
