"""The options of `foredraft plan`, and what their values may be."""

from __future__ import annotations

import argparse

from engine.arguments import Parser, lists_of, names_of, number, whole
from engine.lab.plan.device import CUSTOM, DEVICES
from engine.lab.plan.numerics import KV_BYTES, PRECISIONS

DESCRIPTION = """\
Does speculation pay for a pair of models on a device? On paper: from the shapes in their
config.json and the device's data sheet. Needs no weights, and downloads nothing.

  foredraft plan --target llama-3.1-70b --draft llama-3.2-1b --device h100-sxm --devices 4
  foredraft plan --target DIR/config.json --device cpu --bandwidth 80 --tflops 2
  foredraft plan --examples
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft plan", DESCRIPTION)
    parser.add_argument("--list", action="store_true", help="the presets: models and devices")
    parser.add_argument("--examples", action="store_true", help="worked examples, with arithmetic")
    _add_models(parser)
    _add_device(parser)
    _add_load(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it, too (foredraft[plots])")
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = "preset, config.json, folder with one, or hub name in the local cache"
    parser.add_argument("--target", metavar="MODEL", help=models)
    parser.add_argument("--draft", metavar="MODEL", help="the same; without: guesses are free")
    parser.add_argument(
        "--precision", type=names_of(PRECISIONS), default=tuple(PRECISIONS), metavar="LIST",
        help=f"of the weights, any of {','.join(PRECISIONS)} (all)",
    )  # fmt: skip
    parser.add_argument(
        "--draft-precision", choices=PRECISIONS, help="of the draft's weights (the target's)"
    )
    parser.add_argument("--kv", choices=KV_BYTES, default="bf16", help="of the KV cache (bf16)")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="NAME", help=f"{', '.join(DEVICES)}, or {CUSTOM}: any machine"
    )
    parser.add_argument(
        "--devices", type=whole(1, 4096), default=1, metavar="N", help="tensor parallel over N (1)"
    )
    above = number(0, 1e9, above=True)
    parser.add_argument("--bandwidth", type=above, metavar="GB/S", help="of one device's memory")
    parser.add_argument("--tflops", type=above, metavar="N", help="dense, for every precision")
    parser.add_argument("--memory", type=above, metavar="GB", help="of one device")
    parser.add_argument(
        "--launch-overhead", type=number(0, 1e6), default=0.0, metavar="US",
        help="microseconds that each layer of a forward pass takes besides its work (0)",
    )  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--acceptance", type=number(0, 1), default=0.8, metavar="A",
        help="chance that a guess is kept, given those before it were (0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=lists_of(whole(1, 2**20)), metavar="LIST",
        default=tuple(2**i for i in range(9)), help="sequences at once (1,2,4,...,256)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=lists_of(whole(1, 2**30)), metavar="LIST",
        default=(2048, 8192, 32_768, 131_072), help="tokens of each (2k,8k,32k,128k; k is 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--k-max", type=whole(0, 64), default=16, metavar="K", help="most guesses a round (16)"
    )
