"""`python -m engine.lab.plan` is `foredraft plan`. Exit code 0; 2 for invalid arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.arguments import Parser, exit_code, lists_of, names_of, number, show, whole
from engine.config import BUILTIN
from engine.errors import ConfigError
from engine.lab.files import writable, write_json
from engine.lab.plan.card import Settings, card, device_line, model_line
from engine.lab.plan.roofline import CUSTOM, DEVICES, KV_BYTES, PRECISIONS, device_of
from engine.lab.plan.shape import PRESETS, find_model

DESCRIPTION = """\
Does speculation pay for a pair of models on a device? On paper: from the shapes in their
config.json and the device's data sheet, or what this machine reads and multiplies in a second.
Needs no weights, and downloads nothing.

  foredraft plan --target llama-3.1-70b --draft llama-3.2-1b --device h100-sxm --devices 4
  foredraft plan --target DIR/config.json                             # here: measured
  foredraft plan --target DIR/config.json --bandwidth 80 --tflops 2   # any other
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    parsed = parser.parse_args(given)
    if parsed.list and len(given) > 1:
        parser.error("--list takes no other options")
    return exit_code("foredraft plan", lambda: show(answer(parsed)))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft plan", DESCRIPTION)
    add, above = parser.add_argument, number(0, 1e9, above=True)
    models = "preset, config.json, folder with one, or hub name in the local cache"
    add("--list", action="store_true", help="the presets: models and devices")
    add("--target", metavar="MODEL", help=models)
    add("--draft", metavar="MODEL", help="like --target; default: proposals cost nothing")
    add("--precision", type=names_of(PRECISIONS), default=tuple(PRECISIONS), metavar="LIST",
        help=f"of the weights, any of {','.join(PRECISIONS)} (all)")  # fmt: skip
    add("--draft-precision", choices=PRECISIONS, help="of the draft's weights (the target's)")
    add("--kv", choices=KV_BYTES, default="bf16", help="of the KV cache (bf16)")
    add("--device", metavar="NAME", choices=[*DEVICES, CUSTOM], default=CUSTOM,
        help=f"{', '.join(DEVICES)}, or {CUSTOM}: any machine, and of which no figures are given,"
        f" this one ({CUSTOM})")  # fmt: skip
    add("--devices", type=whole(1, 4096), default=1, metavar="N",
        help="tensor parallel over N (1)")  # fmt: skip
    add("--bandwidth", type=above, metavar="GB/S", help="of one device's memory")
    add("--tflops", type=above, metavar="N", help="dense, for every precision")
    add("--memory", type=above, metavar="GB", help="of one device")
    add("--launch-overhead", type=number(0, 1e6), default=0.0, metavar="US",
        help="microseconds that each layer of a forward pass takes besides its work (0)",
    )  # fmt: skip
    add("--acceptance", type=number(0, 1), default=0.8, metavar="A",
        help="chance that a draft token is accepted if all before it are (0.8)")  # fmt: skip
    add("--batch", type=lists_of(whole(1, 2**20)), metavar="LIST",
        default=tuple(2**i for i in range(9)), help="sequences at once (1,2,4,...,256)",
    )  # fmt: skip
    add("--context", type=lists_of(whole(1, 2**30)), metavar="LIST",
        default=(2048, 8192, 32_768, 131_072), help="tokens of each (2k,8k,32k,128k; k is 1024)",
    )  # fmt: skip
    add("--k-max", type=whole(0, 64), default=16, metavar="K", help="largest K (16)")
    add("--json", metavar="FILE", help="write everything as JSON, too")
    return parser


def answer(parsed: argparse.Namespace) -> str:
    """Return the text to print, and write the --json file. Raises EngineError."""
    if parsed.list:
        return presets()
    models = [name for name in (parsed.target, parsed.draft) if name and os.path.exists(name)]
    reads = [*models, *(Path(name, "config.json") for name in models)]
    writable({"--json": parsed.json}, reads=reads)
    plan_settings = settings(parsed)
    write_json(parsed.json, plan_settings.as_json())
    return card(plan_settings)


def settings(parsed: argparse.Namespace) -> Settings:
    """Convert the options to Settings. Raises EngineError."""
    if parsed.target is None:
        raise ConfigError("say which model with --target (--list shows the presets)")
    figures = {name: getattr(parsed, name) for name in ("bandwidth", "tflops", "memory")}
    if parsed.device == CUSTOM and None in (parsed.bandwidth, parsed.tflops):
        from engine.lab.plan.machine import here  # imports torch, which is slow

        device = here(parsed.devices, **figures)
    else:
        device = device_of(parsed.device, parsed.devices, **figures)
    return Settings(
        device=device,
        target=find_model(parsed.target, "target"),
        draft=None if parsed.draft is None else find_model(parsed.draft, "draft"),
        precisions=parsed.precision,
        draft_precision=parsed.draft_precision,
        kv=parsed.kv,
        launch=parsed.launch_overhead * 1e-6,
        acceptance=parsed.acceptance,
        batches=parsed.batch,
        contexts=parsed.context,
        k_max=parsed.k_max,
    )


def presets() -> str:
    """Return a list of the preset models and devices."""
    pair = f"{BUILTIN}: the built-in target as --target, the built-in draft as --draft"
    models = [model_line(find_model(name, "target")) for name in PRESETS]
    devices = [device_line(device_of(name)) for name in DEVICES]
    return "\n".join(["models", *models, pair, "", "devices", *devices])


if __name__ == "__main__":
    sys.exit(main())
