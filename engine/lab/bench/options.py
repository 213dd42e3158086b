"""Options shared by the offline programs: the pair, the device, the number of threads, and the
clock."""

from __future__ import annotations

import argparse
import os
import re
import time
from functools import partial
from typing import Any, get_args

import torch
from transformers import AutoTokenizer

from engine.arguments import whole
from engine.child import VARIABLES, engine_threads
from engine.config import BUILTIN, DTypeName, EngineConfig, QuantizationName, model_folder
from engine.errors import ConfigError, ModelError, one_line
from engine.lab.bench.offline import Clock, Encode
from engine.model.memory import weights_of
from engine.model.pair import Pair, load_pair


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add the options of `add_target` and the proposer's, for `load`."""
    add_target(parser)
    add = parser.add_argument
    add("--draft", default=BUILTIN,
        help="draft folder or hub name; self or self:N: the target's own first layers")  # fmt: skip
    add = parser.add_mutually_exclusive_group().add_argument
    add("--medusa", metavar="HEADS", help="instead: folder or hub name of heads, or demo")
    add("--eagle", metavar="HEAD", help="instead: folder or hub name of an EAGLE-3 head")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options for target, device, threads (`set_threads`) and clock (`clock_of`)."""
    add = parser.add_argument
    add("--target", default=BUILTIN, help="model folder or hub name")
    add("--device", type=_device, default="auto", help="auto, cpu or cuda")
    add("--dtype", choices=get_args(DTypeName), default="auto", help="its numbers")
    add("--quantization", default="none", choices=get_args(QuantizationName),
        help="of the target's linear layers; the draft stays as it is")  # fmt: skip
    add("--threads", type=whole(1, 1024), help="CPU threads; default: as the server does")
    add("--cpu-seconds", action="store_true",
        help="time by the seconds that this process computes: for a machine that others use too;"
        " needs --threads 1")  # fmt: skip


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is none of auto, cpu and cuda")
    return text


def set_threads(threads: int | None) -> None:
    """Set torch's threads in this process; None: as many as a server's engine would have."""
    if threads or VARIABLES[0] not in os.environ:
        torch.set_num_threads(threads or engine_threads())


def clock_of(parsed: argparse.Namespace) -> Clock:
    """Return the requested clock: wall time or CPU time. Raises ConfigError."""
    if not parsed.cpu_seconds:
        return time.perf_counter
    if parsed.threads != 1:
        raise ConfigError("--cpu-seconds needs --threads 1: it cannot tell threads apart")
    return time.process_time


def pair_config(parsed: argparse.Namespace) -> EngineConfig:
    """Return the config of the requested pair."""
    proposer = proposer_of(parsed.draft, parsed.dtype)
    for kind in ("medusa", "eagle"):
        if (path := getattr(parsed, kind)) is not None:
            proposer = {"kind": kind, "path": path}
    return config_of(parsed, proposer)


def proposer_of(draft: str, dtype: str) -> dict[str, Any]:
    """Return the proposer settings for a value of `--draft`."""
    if own := re.fullmatch(r"self(?::([1-9]\d{0,3}))?", draft):
        return {"kind": "self", "layers": int(own[1]) if own[1] else "auto"}
    return {"kind": "draft_model", "path": draft, "dtype": dtype}


def config_of(parsed: argparse.Namespace, proposer: dict[str, Any]) -> EngineConfig:
    """Return the config for the options of `add_target` and this proposer."""
    target = {"path": parsed.target, "dtype": parsed.dtype, "quantization": parsed.quantization}
    return EngineConfig.model_validate(
        {"target": target, "device": parsed.device, "speculation": {"proposer": proposer}}
    )


def load(parsed: argparse.Namespace) -> tuple[EngineConfig, Pair, Encode]:
    """Load the requested pair; return its config, the pair and its encoder. Raises EngineError."""
    config = pair_config(parsed)
    pair = load_pair(config)
    return config, pair, partial(tokenizer_of(parsed.target).encode, add_special_tokens=False)


def tokenizer_of(target: str) -> Any:
    """Return a model's tokenizer. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(model_folder(target, "target"))
    except Exception as error:  # transformers and Rust raise whatever the file made them raise
        raise ModelError(f"cannot load the tokenizer of {target}: {one_line(error)}") from error


def pair_facts(pair: Pair, clock: Clock) -> dict[str, Any]:
    """Return facts about the pair, machine and clock, for headings."""
    device, draft = pair.target.device, pair.draft
    name = draft.path if draft else "none"
    if draft and draft.borrows:
        name = f"the target's first {len(draft.layers)} layers"
    return {
        "target": pair.target.path,
        "draft": name,
        "dtype": pair.target.dtype_name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "MB of target weights": round(weights_of(pair.target).size / 1e6),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": "of CPU time" if clock is time.process_time else "of the wall's clock",
    }
