"""`python -m engine.lab.synthetic`: write a random target and a draft with a chosen acceptance, as
two folders for `foredraft serve --target DIR/target --draft DIR/draft`.

Acceptance is the mean of the acceptances at temperature 0 and 1. Prints a table of the scales it
tries, then the pair's acceptance on other texts, and writes the pair. The same arguments give the
same weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.arguments import Parser, exit_code, number, whole
from engine.errors import ConfigError
from engine.lab.bench.options import set_threads
from engine.lab.files import new_folder
from engine.lab.synthetic.pair import (
    MOST_POSITIONS,
    POSITIONS,
    Agreement,
    Shape,
    make_pair,
    save,
    shape_named,
    text_of,
)
from engine.model.loader import pick_device

CHECKS = 3  # other texts on which the chosen scale is checked


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 for invalid arguments."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("python -m engine.lab.synthetic", lambda: run(parsed))


def run(parsed: argparse.Namespace) -> int:
    """Make and write the pair; return the exit code. Raises EngineError."""
    device = str(pick_device(parsed.device))
    shape = replace(parsed.parameters, positions=parsed.positions)
    if parsed.draft_layers >= shape.layers:
        raise ConfigError(
            f"--draft-layers is {parsed.draft_layers}; the target has {shape.layers} layers, so "
            f"allowed are 1 to {shape.layers - 1}"
        )
    set_threads(None)
    with new_folder(parsed.output) as folder:
        write(parsed, shape, device, folder)
    print(f"written: {Path(parsed.output, 'target')} and {Path(parsed.output, 'draft')}")
    return 0


def build_parser() -> Parser:
    parser = Parser("python -m engine.lab.synthetic", __doc__)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="new folder")
    add("--parameters", type=shape_named, default="3e8", metavar="N",
        help="approximate parameters of the target, or `8b`: as Llama 3.1 8B (3e8)")  # fmt: skip
    add("--positions", type=whole(256, MOST_POSITIONS), default=POSITIONS, metavar="N",
        help=f"longest sequence ({POSITIONS})")  # fmt: skip
    add("--draft-layers", type=whole(1, 1000), default=1, metavar="N",
        help="how many the draft shares (1)")  # fmt: skip
    add("--acceptance", type=number(0.05, 0.99), default=0.8, metavar="A", help="wanted (0.8)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where it is made (cpu)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of the weights (0)")
    add("--tokens", type=whole(128, 1 << 16), default=768, metavar="N",
        help="of text to measure acceptance on (768)")  # fmt: skip
    return parser


def write(parsed: argparse.Namespace, shape: Shape, device: str, folder: Path) -> None:
    """Build, calibrate and save the pair; print a line for each scale that is tried."""
    layers = parsed.draft_layers
    print(
        f"target {shape.parameters(shape.layers) / 1e6:.1f} M parameters, {shape.layers} layers of "
        f"width {shape.width}; draft {shape.parameters(layers) / 1e6:.1f} M, {layers} of them",
        flush=True,
    )
    print("     scale     T=0    T=1   mean", flush=True)
    target, draft = make_pair(
        shape, layers, parsed.acceptance, tokens=parsed.tokens, seed=parsed.seed,
        device=device, report=row,
    )  # fmt: skip
    for other in range(parsed.seed + 1, parsed.seed + 1 + CHECKS):
        row(f"other text {other}", text_of(draft, parsed.tokens, other).agreement(target))
    save(folder, target, draft, getattr(torch, parsed.dtype))


def row(name: str, found: Agreement) -> None:
    print(f"{name:>12}  {found.greedy:.3f}  {found.sampled:.3f}  {found.mean:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
