"""Captured CUDA graphs: replays equal eager forwards, a proposal is one replay, and the host waits
for the device once per step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.model.graphs import CudaRecorder
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.runner import Graphs, ModelRunner
from engine.scheduling.segment import Segment
from tests.support.cuda import ON_CUDA
from tests.support.reference import Reference

pytestmark = ON_CUDA
PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]
STEPS = [
    [Segment(PROMPT, 0, [3, 1], 1)],
    [Segment([7], 11, [3, 1], 1), Segment(PROMPT[:6], 0, [9], 1)],
    [Segment([7, 8, 9], 12, [3, 1], 3), Segment([1], 6, [9], 1)],
    [Segment([4], 15, [3, 1], 1), Segment(PROMPT * 3, 0, [20, 21, 22], 2)],
]


def test_replays_equal_eager_forwards(tiny_target: str) -> None:
    """Law: this also holds in a second round over the same buckets, with other blocks."""
    model = load_model(tiny_target, role="target", device="cuda", dtype="float32")
    device = model.device
    ours = ModelRunner(
        model,
        KVCache(40, 16, device, padding_block=True),
        "target",
        attention="triton",
        graphs=Graphs(CudaRecorder(device), 32),
    )
    theirs = ModelRunner(model, KVCache(40, 16, device), "target", attention="sdpa")
    [*ours.capture()]
    for segments in STEPS * 2:
        found, expected = ours.forward(segments).logits, theirs.forward(segments).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def engine(target: str, draft: str, k: int, **changes: Any) -> Engine:
    config = {
        "target": {"path": target, "dtype": "float32"},
        "device": "cuda",
        "cache": {"num_blocks": 256},
        "schedule": {"max_step_tokens": 64, "max_sequences": 8},
        "speculation": {
            "proposer": {"path": draft, "dtype": "float32"},
            "controller": {"kind": "fixed", "k": k},
        },
        **changes,
    }
    return Engine(EngineConfig.model_validate(config))


def start(made: Engine, count: int, tokens: int) -> None:
    for seed in range(count):
        params = SamplingParams(
            seed=seed, max_tokens=tokens, temperature=float(seed % 2), ignore_eos=True
        )
        made.add(Submit(str(seed), PROMPT, params, 0.0))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
@pytest.mark.parametrize("k", [0, 4])
def test_the_text_is_the_reference_text(
    k: int, attention: str, graphs: bool, tiny_target: str, tiny_draft: str, tiny_eos: list[int]
) -> None:
    """Law: neither the backend nor a graph changes the text."""
    made = engine(tiny_target, tiny_draft, k, attention=attention, graphs=graphs)
    start(made, 4, 16)
    found: dict[str, list[int]] = {}
    while made.has_work:
        for output in made.step().items:
            found.setdefault(output.id, []).extend(output.tokens)
    reference = Reference(tiny_target, tiny_eos)
    for seed in range(4):
        params = SamplingParams(
            seed=seed, max_tokens=16, temperature=float(seed % 2), ignore_eos=True
        )
        assert found[str(seed)] == reference.generate(PROMPT, params)[0]


@pytest.mark.parametrize("k", [0, 4])
def test_the_host_waits_once(k: int, tiny_target: str, tiny_draft: str) -> None:
    """Law: a decoding step waits once, for its draws; a draft's proposal and the verdicts on it
    come in the same copy. torch reports each synchronizing call."""
    made = engine(tiny_target, tiny_draft, k, attention="triton")
    start(made, 2, 60)
    for _ in range(4):  # the prompts, and late captures
        made.step()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # setting this mode warns as well
            made.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waited = [str(w.message) for w in seen if "synchronizing CUDA operation" in str(w.message)]
    assert len(waited) <= 1, waited
