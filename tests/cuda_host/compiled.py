"""`python -m tests.cuda_host.compiled`, on the stand-in: print as one line of JSON which Triton
kernels requests compile after the start, by kind of request. A kernel in Triton's cache on disk
counts too."""

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
from engine.messages import SamplingParams, Submit
from tests.cuda_host.limits import FIELDS
from tests.cuda_host.swaps import folder_of
from tests.cuda_host.valueless import without_values

PENALTIES = FIELDS["penalties"] | {"min_tokens": 5}
ALL = FIELDS["filters"] | PENALTIES | {"logprobs": 20}
# Kinds of requests: the number and length of prompts, and the fields of each, in turn.
CASES: dict[str, tuple[int, int, list[dict[str, Any]]]] = {
    "none": (3, 300, [{}]),
    "one": (1, 1500, [{}]),
    "more rows than in a graph": (64, 40, [{}]),
    "filters": (4, 40, [FIELDS["filters"]]),
    "one with filters": (1, 40, [FIELDS["filters"]]),
    "many with filters": (64, 40, [FIELDS["filters"]]),
    "more ids than are ranked": (4, 40, [{"top_k": 1200}]),
    "penalties": (4, 40, [PENALTIES]),
    "one with penalties": (1, 40, [PENALTIES]),
    **{f"logprobs={count}": (4, 40, [{"logprobs": count}]) for count in (0, 1, 5, 20)},
    **{f"prompt_logprobs={n}": (4, 300, [{"prompt_logprobs": n}]) for n in (0, 1, 20)},
    "all fields": (4, 40, [ALL]),
    "mixed": (8, 40, [{}, {"temperature": 0.0}, FIELDS["filters"], PENALTIES, ALL]),
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    compiled, found = list[str](), dict[str, dict[str, Any]]()
    triton.knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told["repr"])
    with tempfile.TemporaryDirectory() as name:
        more = {"vocab_size": 2048, "max_position_embeddings": 4096}
        target, draft = (folder_of(Path(name, role), **more) for role in ("target", "draft"))
        config = EngineConfig.model_validate(
            {
                "device": "cuda", "attention": "triton", "cache": {"num_blocks": 4096},
                "target": {"path": target, "dtype": "bfloat16"},
                "speculation": {"proposer": {"path": draft, "dtype": "bfloat16"}, "companions": []},
            }
        )  # fmt: skip
        engine = Engine(config)
    found["at start"] = {"compiled": len(compiled)}
    engine.set_speculation("fixed", 4)
    for case, (number, length, fields) in CASES.items():
        compiled.clear()
        for i in range(number):
            params = SamplingParams(
                seed=i, max_tokens=20, ignore_eos=True, **fields[i % len(fields)]
            )
            prompt = [(7 * i + j) % 400 + 5 for j in range(length)]
            engine.add(Submit(f"{case} {i}", prompt, params, 0.0))
        tokens = 0
        while engine.has_work:
            tokens += sum(len(item.tokens) for item in engine.step().items)
        found[case] = {"compiled": [*compiled], "tokens": tokens, "wanted": 20 * number}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
