"""`python -m tests.cuda_host.bounds`, on the stand-in: print, as one line of JSON, what decoding
steps of a tiny pair ask of the device while sequences have different numbers of draft tokens.

Each case is run twice, so that its graphs are captured before the second run, which is counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Speculation, Submit
from tests.cuda_host.counts import StandIn
from tests.cuda_host.limits import STEPS
from tests.cuda_host.swaps import folder_of
from tests.cuda_host.valueless import without_values

K, NUMBER, PROMPT = 4, 32, 12
ENDS = [{"max_tokens": 20 + i} for i in range(NUMBER)]
BOUNDS = [{"speculation": Speculation(max_draft=i % (K + 1))} for i in range(NUMBER)]
CASES: dict[str, list[dict[str, Any]]] = {
    "none": [{}] * NUMBER,
    "ends of texts": ENDS,
    "bounds of requests": BOUNDS,
    "both, with fields": [
        one | two | {"top_p": 0.9, "presence_penalty": 0.5}
        for one, two in zip(ENDS, BOUNDS, strict=True)
    ],
}


def config_in(folder: Path) -> EngineConfig:
    target = folder_of(folder / "target")
    draft = {"path": folder_of(folder / "draft", num_hidden_layers=1), "dtype": "bfloat16"}
    return EngineConfig.model_validate(
        {
            "device": "cuda", "attention": "triton",
            "target": {"path": target, "dtype": "bfloat16"}, "cache": {"num_blocks": 512},
            "schedule": {"max_step_tokens": 512, "max_sequences": NUMBER},
            "speculation": {
                "proposer": draft, "companions": [], "controller": {"kind": "adaptive"},
            },
        }
    )  # fmt: skip


def measured(engine: Engine, standin: StandIn, case: str) -> dict[str, Any]:
    """Return the maximum of each of `STEPS` in any step after the prompts, and the number of steps
    in which sequences had different numbers of draft tokens."""
    for i, fields in enumerate(CASES[case]):
        params = SamplingParams(seed=i, ignore_eos=True, **{"max_tokens": 60, **fields})
        prompt = [(7 * i + j) % 400 + 5 for j in range(PROMPT)]
        engine.add(Submit(f"{case} {i}", prompt, params, 0.0))
    most, unequal = Counter({step.name: 0 for step in STEPS}), 0
    while engine.has_work:
        standin.lap()
        metrics, counts = engine.step().metrics, standin.lap()
        if metrics.num_prompt_tokens:
            continue
        unequal += sum(map(bool, metrics.k_counts)) > 1
        for step in STEPS:
            most[step.name] = max(most[step.name], sum(counts[name] for name in step.counters))
    return {"most": most, "unequal": unequal}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin = StandIn()
    with tempfile.TemporaryDirectory() as name:
        engine = Engine(config_in(Path(name)))
    engine.set_speculation("fixed", K)
    found = [{case: measured(engine, standin, case) for case in CASES} for _ in range(2)]
    sys.stdout.write(json.dumps(found[1] | {"violations": standin.violations}) + "\n")


if __name__ == "__main__":
    main()
