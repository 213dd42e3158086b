"""Options that benchmarks share: which pair, on what, with how many threads."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from typing import Any, get_args

import torch

from engine.arguments import whole
from engine.child.threads import VARIABLES, engine_threads, granted_cores
from engine.config import BUILTIN, DTypeName, EngineConfig


def add_target(parser: argparse.ArgumentParser) -> None:
    """A model, on what, and the threads that `set_threads` sets."""
    parser.add_argument("--target", default=BUILTIN, help="model folder or hub name")
    parser.add_argument("--device", type=_device, default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="auto", help="its numbers")
    parser.add_argument(
        "--threads", type=whole(1, 1024), help="CPU threads; default: as the server does"
    )


def add_pair(parser: argparse.ArgumentParser) -> None:
    """A target and its draft, as `pair_config` reads them."""
    add_target(parser)
    parser.add_argument("--draft", default=BUILTIN, help="draft folder or hub name")


def set_threads(threads: int | None) -> None:
    """Of torch in this process: so many, or as many as an engine of the server would have."""
    if threads or VARIABLES[0] not in os.environ:
        torch.set_num_threads(threads or engine_threads(granted_cores()))


def pair_config(
    parsed: argparse.Namespace,
    *,
    quantization: str = "none",
    controller: Mapping[str, Any] | None = None,
    **others: Any,
) -> EngineConfig:
    """The pair as named; `quantization` is the target's. `others`: further keys."""
    target = {"path": parsed.target, "dtype": parsed.dtype, "quantization": quantization}
    proposer = {"path": parsed.draft, "dtype": parsed.dtype}
    return EngineConfig.model_validate(
        {
            "target": target,
            "device": parsed.device,
            "speculation": {"proposer": proposer, "controller": controller or {}},
            **others,
        }
    )


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is none of auto, cpu and cuda")
    return text
