"""Steps on a CUDA device against the reference on the CPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from tests.support import eagle, medusa, tiny
from tests.support.cuda import ON_CUDA
from tests.support.reference import Reference

pytestmark = ON_CUDA

PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]
PARAMS = [
    SamplingParams(seed=i, max_tokens=24, temperature=i / 5, top_p=0.95, ignore_eos=True)
    for i in range(8)
]
Proposer = dict[str, object]  # its configuration


def draft_model(path: str, dtype: str) -> Proposer:
    return {"kind": "draft_model", "path": path, "dtype": dtype}


def proposer_of(name: str, draft: str, folder: Path) -> Proposer:
    """Return a proposer in float32; random heads are saved in `folder`. `branches`: a draft model
    with second-best tokens."""
    target: Any = tiny.llama(tiny.ON_CUDA)
    words = target.get_output_embeddings().weight
    heads = medusa.save(medusa.random_heads(words), folder / "medusa")
    head = eagle.save(eagle.random_head(words), folder / "eagle")
    proposers: dict[str, Proposer] = {
        "draft_model": draft_model(draft, "float32"),
        "branches": {**draft_model(draft, "float32"), "branches": 2},
        "self": {"kind": "self", "layers": 1},
        "lookahead": {"kind": "lookahead", "ngram": 3},
        "medusa": {"kind": "medusa", "path": heads},
        "eagle": {"kind": "eagle", "path": head},
    }
    return proposers[name]


def engine_of(
    target: str, proposer: Proposer, dtype: str, k: int, *, batch_invariant: bool = False
) -> Engine:
    config = EngineConfig.model_validate(
        {
            "target": {"path": target, "dtype": dtype, "batch_invariant": batch_invariant},
            "device": "cuda",
            "cache": {"num_blocks": 512},
            "speculation": {"proposer": proposer, "controller": {"kind": "fixed", "k": k}},
        }
    )
    return Engine(config)


def replies(engine: Engine) -> tuple[list[list[int]], Counter[str]]:
    """Run a request for each of `PARAMS`; return their tokens, and how many draft tokens of each
    proposer were accepted."""
    for i, params in enumerate(PARAMS):
        engine.add(Submit(str(i), PROMPT, params, 0.0))
    found: list[list[int]] = [[] for _ in PARAMS]
    accepted = Counter[str]()
    while engine.has_work:
        outputs = engine.step()
        for output in outputs.items:
            found[int(output.id)] += output.tokens
        for name, (_, count) in outputs.metrics.by_proposer.items():
            accepted[name] += count
    assert engine.gauges().blocks_used == 0
    return found, accepted


@pytest.mark.parametrize(
    ("name", "k"),
    [
        *(("draft_model", 0), ("draft_model", 4), ("self", 4)),
        *(("branches", 8), ("lookahead", 8), ("medusa", 8), ("eagle", 8)),  # trees
    ],
)
def test_float32_equals_the_reference(
    name: str, k: int, tiny_target: str, tiny_draft: str, tiny_eos: list[int], tmp_path: Path
) -> None:
    """Law: the same seed gives the same text on both devices, with and without speculation, by
    each proposer that runs on the device or makes trees; some of its draft tokens are accepted."""
    reference = Reference(tiny_target, tiny_eos)
    engine = engine_of(tiny_target, proposer_of(name, tiny_draft, tmp_path), "float32", k)
    found, accepted = replies(engine)
    assert found == [reference.generate(PROMPT, params)[0] for params in PARAMS]
    assert (accepted[engine.ready.proposer] > 0) == (k > 0)


def test_bfloat16_serves(tiny_target: str, tiny_draft: str) -> None:
    """Law: in bfloat16 every request still ends with all of its tokens. The text follows the
    target's distribution, but near-ties may go either way."""
    found, _ = replies(engine_of(tiny_target, draft_model(tiny_draft, "bfloat16"), "bfloat16", 4))
    assert {len(tokens) for tokens in found} == {24}


def test_batch_invariant_bfloat16_says_the_same_at_any_k(tiny_target: str, tiny_draft: str) -> None:
    """Law: with graphs, too, a row's bits do not depend on the batch: in a verification among other
    sequences they equal those of plain decoding."""
    proposer, found = draft_model(tiny_draft, "bfloat16"), list[list[list[int]]]()
    for k in (0, 4):
        engine = engine_of(tiny_target, proposer, "bfloat16", k, batch_invariant=True)
        found.append(replies(engine)[0])
    assert found[0] == found[1]
