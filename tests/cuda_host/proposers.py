"""`python -m tests.cuda_host.proposers`, on the stand-in: print as one line of JSON the most that
a step asks of the device, by proposer, what was reported against it, and the kernels that requests
compiled. Four sequences; K is 4, for trees the number of nodes."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton

from engine.config import EngineConfig
from engine.core import Engine
from engine.model.medusa_heads import MedusaHeads, save_heads
from tests.cuda_host.counts import StandIn
from tests.cuda_host.families import SEQUENCES, SIZES, stepped
from tests.cuda_host.swaps import folder_of
from tests.cuda_host.valueless import without_values
from tests.support import eagle

K = 4


def proposers(folder: Path, target: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each proposer, its heads saved in `folder`. `branches`: a draft
    model, here the target's weights again, whose second-best tokens are verified, too."""
    words = torch.zeros(SIZES["vocab_size"], SIZES["hidden_size"])
    save_heads(MedusaHeads(3, 1, words.bfloat16()), folder / "medusa", "heads")
    sizes = {"hidden_size": words.shape[1], "vocab_size": len(words)}
    head = eagle.save(eagle.random_head(words), folder / "eagle", **sizes)
    return {
        "ngram": {},
        "lookahead": {},
        "self": {"layers": 1},
        "medusa": {"path": str(folder / "medusa")},
        "eagle": {"path": head},
        "branches": {"kind": "draft_model", "path": target, "dtype": "bfloat16", "branches": 2},
    }


def engine_of(target: str, kind: str, more: dict[str, Any]) -> Engine:
    config = EngineConfig.model_validate(
        {
            "device": "cuda", "attention": "triton", "cache": {"num_blocks": 64},
            "target": {"path": target, "dtype": "bfloat16"},
            "schedule": {"max_step_tokens": 32, "max_sequences": SEQUENCES},
            "speculation": {
                "proposer": {"kind": kind, **more}, "companions": [],
                "controller": {"kind": "fixed", "k": K},
            },
        }
    )  # fmt: skip
    return Engine(config)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        target = folder_of(Path(name, "target"))
        configs = proposers(Path(name), target)  # before values lose their meaning
        without_values()
        standin, compiled = StandIn(), list[str]()
        triton.knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told["repr"])
        for kind, more in configs.items():
            before = len(standin.violations)
            engine = engine_of(target, kind, more)
            compiled.clear()
            most = stepped(engine, standin)
            reported = standin.violations[before:]
            found[kind] = {"most": most, "violations": reported, "compiled": [*compiled]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
