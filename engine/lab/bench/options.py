"""What the offline command lines share: which pair, on what, with how many threads, whose seconds
count."""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from transformers import AutoTokenizer

from engine.arguments import number, whole
from engine.child import VARIABLES, engine_threads
from engine.config import BUILTIN, DTypeName, EngineConfig, QuantizationName, model_folder
from engine.errors import ConfigError
from engine.lab.bench.offline import Clock, Encode
from engine.lab.synthetic.pair import make_pair, save, shape_named
from engine.model.loader import pick_device
from engine.model.memory import weights_of
from engine.model.pair import Pair, load_pair

SYNTHETIC_PROMPT = 32  # tokens


def add_target(parser: argparse.ArgumentParser) -> None:
    """A model, on what, and the threads that `set_threads` sets."""
    parser.add_argument("--target", default=BUILTIN, help="model folder or hub name")
    parser.add_argument("--device", type=_device, default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="auto", help="its numbers")
    parser.add_argument(
        "--threads", type=whole(1, 1024), help="CPU threads; default: as the server does"
    )


def add_pair(parser: argparse.ArgumentParser) -> None:
    """A target and its draft, as `load` reads them, and the clock that `clock_of` gives."""
    add_target(parser)
    add = parser.add_argument
    add("--draft", default=BUILTIN, help="draft folder or hub name")
    add("--quantization", default="none", choices=get_args(QuantizationName),
        help="of the target's linear layers; the draft stays as it is")  # fmt: skip
    add("--synthetic", metavar="SIZE",
        help="instead of folders: a random pair made for it, `8b` or a number of"
        " parameters")  # fmt: skip
    add("--acceptance", type=number(0.05, 0.99), help="of the synthetic pair (0.8)")
    add("--cpu-seconds", action="store_true",
        help="time by the seconds that this process computes: for a machine that others use too;"
        " needs --threads 1")  # fmt: skip


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is none of auto, cpu and cuda")
    return text


def set_threads(threads: int | None) -> None:
    """Of torch in this process: so many, or as many as an engine of the server would have."""
    if threads or VARIABLES[0] not in os.environ:
        torch.set_num_threads(threads or engine_threads())


def clock_of(parsed: argparse.Namespace) -> Clock:
    """The one asked for. Raises ConfigError."""
    if not parsed.cpu_seconds:
        return time.perf_counter
    if parsed.threads != 1:
        raise ConfigError("--cpu-seconds needs --threads 1: it cannot tell threads apart")
    return time.process_time


def pair_config(parsed: argparse.Namespace) -> EngineConfig:
    """The pair as named."""
    target = {"path": parsed.target, "dtype": parsed.dtype, "quantization": parsed.quantization}
    proposer = {"path": parsed.draft, "dtype": parsed.dtype}
    return EngineConfig.model_validate(
        {"target": target, "device": parsed.device, "speculation": {"proposer": proposer}}
    )


def load(parsed: argparse.Namespace) -> tuple[EngineConfig, Pair, Encode]:
    """The pair, as `pair_config` says or synthetic, and what makes ids of its prompts. Raises
    EngineError."""
    config = pair_config(parsed)
    if parsed.synthetic is None:
        if parsed.acceptance is not None:
            raise ConfigError(
                "--acceptance is of the pair that --synthetic makes; folders have theirs"
            )
        pair = load_pair(config)
        tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(parsed.target, "target"))
        return config, pair, partial(tokenizer.encode, add_special_tokens=False)
    for option, name in (("--target", parsed.target), ("--draft", parsed.draft)):
        if name != BUILTIN:
            raise ConfigError(f"{option} names a folder, and --synthetic makes a pair instead")
    shape, layers = shape_named(parsed.synthetic)
    device = str(pick_device(parsed.device))
    with TemporaryDirectory(prefix="synthetic-") as folder:
        made = make_pair(shape, layers, parsed.acceptance or 0.8, device=device)
        save(Path(folder), *made, torch.bfloat16)
        del made  # before it is loaded, so that the device holds one pair only
        parsed = argparse.Namespace(
            **{**vars(parsed), "target": f"{folder}/target", "draft": f"{folder}/draft"}
        )
        config = pair_config(parsed)
        pair = load_pair(config)
    known = range(8, pair.target.vocab_size)
    return config, pair, lambda text: random.Random(text).choices(known, k=SYNTHETIC_PROMPT)


def pair_facts(pair: Pair, clock: Clock) -> dict[str, Any]:
    """What is measured, for headings."""
    return {
        "target": pair.target.path,
        "draft": pair.draft.path if pair.draft else "none",
        "dtype": pair.target.dtype_name,
        "device": pair.target.device_name,
        "MB of target weights": round(weights_of(pair.target).size / 1e6),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": "of CPU time" if clock is time.process_time else "of the wall's clock",
    }
