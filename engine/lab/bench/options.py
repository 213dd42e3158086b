"""What the benchmarks' command lines share: which pair, on what, with how many threads, whose
seconds count."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch

from engine.arguments import Parser, exit_code, whole
from engine.child.threads import VARIABLES, engine_threads, granted_cores
from engine.config import BUILTIN, DTypeName, EngineConfig, model_folder
from engine.errors import ConfigError
from engine.model.pair import Pair

Clock = Callable[[], float]
Encode = Callable[[str], list[int]]


def execute(
    parser: Parser, run: Callable[[argparse.Namespace], int], arguments: Sequence[str] | None
) -> int:
    """A program's exit code: what `run` answers, or 2 for a mistake of the caller."""
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return exit_code(parser.prog, lambda: run(parsed))


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


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option. The parser has `--threads`, too."""
    parser.add_argument(
        "--cpu-seconds", action="store_true",
        help="time by the seconds that this process computes: for a machine that others use too;"
        " needs --threads 1",
    )  # fmt: skip


def clock_of(parsed: argparse.Namespace) -> Clock:
    """The one asked for. Raises ConfigError."""
    if not parsed.cpu_seconds:
        return time.perf_counter
    if parsed.threads != 1:
        raise ConfigError("--cpu-seconds needs --threads 1: it cannot tell threads apart")
    return time.process_time


def clock_name(clock: Clock) -> str:
    """Completes "seconds ...": whose they are."""
    return "of CPU time" if clock is time.process_time else "of the wall's clock"


def encoder(target: str) -> Encode:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(target, "target"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return encode


def pair_facts(pair: Pair) -> dict[str, Any]:
    """What is measured, for headings."""
    return {
        "target": pair.target.path,
        "draft": pair.draft.path if pair.draft else "none",
        "dtype": pair.target.dtype_name,
        "device": pair.target.device_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
