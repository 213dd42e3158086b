"""Steps on a CUDA device against the reference on the CPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from tests.support.cuda import ON_CUDA
from tests.support.reference import Reference

pytestmark = ON_CUDA

PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]


def replies(
    target: str, draft: str, dtype: str, k: int, *, batch_invariant: bool = False
) -> dict[str, list[int]]:
    config = EngineConfig.model_validate(
        {
            "target": {"path": target, "dtype": dtype, "batch_invariant": batch_invariant},
            "device": "cuda",
            "cache": {"num_blocks": 512},
            "speculation": {
                "proposer": {"kind": "draft_model", "path": draft, "dtype": dtype},
                "controller": {"kind": "fixed", "k": k},
            },
        }
    )
    engine = Engine(config)
    for seed in range(8):
        params = SamplingParams(
            seed=seed, max_tokens=24, temperature=seed / 5, top_p=0.95, ignore_eos=True
        )
        engine.add(Submit(str(seed), PROMPT, params, 0.0))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().items:
            found.setdefault(output.id, []).extend(output.tokens)
    assert engine.gauges().blocks_used == 0
    return found


@pytest.mark.parametrize("k", [0, 4])
def test_float32_equals_the_reference(
    k: int, tiny_target: str, tiny_draft: str, tiny_eos: list[int]
) -> None:
    """Law: the same seed gives the same text on both devices, with and without speculation."""
    reference = Reference(tiny_target, tiny_eos)
    found = replies(tiny_target, tiny_draft, "float32", k)
    for seed in range(8):
        params = SamplingParams(
            seed=seed, max_tokens=24, temperature=seed / 5, top_p=0.95, ignore_eos=True
        )
        assert found[str(seed)] == reference.generate(PROMPT, params)[0]


def test_bfloat16_serves(tiny_target: str, tiny_draft: str) -> None:
    """Law: in bfloat16 every request still ends with all of its tokens. The text follows the
    target's distribution, but near-ties may go either way."""
    found = replies(tiny_target, tiny_draft, "bfloat16", 4)
    assert {len(tokens) for tokens in found.values()} == {24}


def test_batch_invariant_bfloat16_says_the_same_at_any_k(tiny_target: str, tiny_draft: str) -> None:
    """Law: with graphs, too, a row's bits do not depend on the batch: in a verification among other
    sequences they equal those of plain decoding."""
    found = [replies(tiny_target, tiny_draft, "bfloat16", k, batch_invariant=True) for k in (0, 4)]
    assert found[0] == found[1]
