"""`python -m tests.cuda_host.evicted`, on the stand-in: let each model keep two graphs of forwards,
and run one sequence, then four, and so on. Prints one line of JSON: what each of these asked of the
device, the tokens that it returned, and the violations in captures."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from engine.messages import SamplingParams, Submit
from engine.model.graphs import GraphPool
from tests.cuda_host.counts import StandIn
from tests.cuda_host.families import FAMILIES, engine_of
from tests.cuda_host.valueless import without_values

TOKENS = 21


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin, found = StandIn(), list[dict[str, Any]]()
    GraphPool.__init__.__defaults__ = (2,)
    with tempfile.TemporaryDirectory() as name:
        engine = engine_of(Path(name), "llama", FAMILIES["llama"])
    for number in (1, 4, 1, 4, 1, 4):
        standin.lap()
        for i in range(number):
            params = SamplingParams(seed=i, max_tokens=TOKENS, ignore_eos=True)
            engine.add(Submit(str(i), [5, 6, 7], params, 0.0))
        tokens = 0
        while engine.has_work:
            tokens += sum(len(item.tokens) for item in engine.step().items)
        found.append(standin.lap() | {"tokens": tokens, "wanted": number * TOKENS})
    sys.stdout.write(json.dumps({"rounds": found, "violations": standin.violations}) + "\n")


if __name__ == "__main__":
    main()
