"""`python -m tests.cuda_host.swaps`, on the stand-in: swap drafts while requests run. Prints one
line of JSON: the outcome of each, the number of pieces its captures were split into between steps,
and the violations in captures."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine.attention.packed_copy import copied_to_device
from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.step import draft_swap
from tests.cuda_host.counts import StandIn
from tests.cuda_host.families import SIZES
from tests.cuda_host.valueless import without_values

DRAFTS: dict[str, dict[str, Any]] = {
    "same shape": {"num_hidden_layers": 2},
    "another shape": {"num_hidden_layers": 1},
}
MOST_STEPS = 5000


def folder_of(folder: Path, **sizes: Any) -> str:
    folder.mkdir(parents=True)
    config = SIZES | {"model_type": "llama"} | sizes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def swapped(engine: Engine, path: str) -> dict[str, Any]:
    engine.swap_draft(path)
    pieces = 0
    for steps in range(MOST_STEPS):
        pieces += engine._swap._pieces is not None
        if len(engine._ids) < 4:
            params = SamplingParams(seed=steps, max_tokens=60, ignore_eos=True)
            engine.add(Submit(str(steps), [5, 6, 7, steps % 500], params, 0.0))
        swap = engine.step().metrics.swap
        if swap is not None and swap.outcome in ("trial", "refused"):
            return {"outcome": swap.outcome, "message": swap.message, "pieces": pieces}
        time.sleep(0.001)
    return {"outcome": "", "message": "nothing was told"}


def mixed_up() -> int:
    """Let two threads copy to the device at once, as steps and a draft's proof do; return the
    number of copies that got the other's numbers."""
    wrong = list[bool]()

    def send(value: int) -> None:
        for size in range(1, 600):
            there = copied_to_device(np.full(size, value, np.int64), torch.device("cuda"))
            here = (ctypes.c_int64 * size).from_address(there.data_ptr())  # it is host memory
            wrong.append(any(number != value for number in here))

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=send, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(usual)
    return sum(wrong)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin, found = StandIn(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        target = folder_of(Path(name, "target"))
        draft = {"path": folder_of(Path(name, "draft")), "dtype": "bfloat16"}
        config = EngineConfig.model_validate(
            {
                "device": "cuda", "attention": "triton",
                "target": {"path": target, "dtype": "bfloat16"}, "cache": {"num_blocks": 256},
                "schedule": {"max_step_tokens": 16, "max_sequences": 8},
                "speculation": {"proposer": draft, "companions": []},
            }
        )  # fmt: skip
        engine = Engine(config)
        plane = engine._cache.planes["draft"]
        for kind, sizes in DRAFTS.items():
            path = folder_of(Path(name, kind), **sizes)
            found[kind] = swapped(engine, path)
            found[kind]["shared"] = engine._cache.planes["draft"] is plane
        with mock.patch.object(draft_swap, "device_limit", return_value=(0, "cuda:0")):
            found["no room"] = swapped(engine, folder_of(Path(name, "wide"), num_hidden_layers=3))
    standin.lap()
    sys.stdout.write(
        json.dumps({"swaps": found, "violations": standin.violations, "mixed up": mixed_up()})
        + "\n"
    )


if __name__ == "__main__":
    main()
