"""Greedy decoding through the runner equals transformers' own greedy `generate`, per family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment
from tests.support import tiny

PROMPT = [1, 9, 40, 77, 12, 5, 33, 64, 100, 3]
LENGTH = 40


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_greedy_equals_generate(family: str, tmp_path: Path) -> None:
    """Law: every served architecture gives the text of transformers, with a chunked prompt and far
    beyond a sliding window of 7."""
    model: Any = tiny.FAMILIES[family]()
    path = tiny.save(model, tmp_path)
    model.set_attn_implementation("eager")  # some releases' SDPA forgets Gemma 2's soft cap
    expected = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
        eos_token_id=-1,
    )[0, len(PROMPT) :].tolist()

    runner = ModelRunner(
        load_model(path, role="target", device="cpu"), KVCache(20, 4, "cpu"), "target"
    )
    blocks = [7, 8, 9, 10, 3, 2, 1, 0, 15, 16, 17, 18, 19]
    runner.forward([Segment(PROMPT[:6], 0, blocks, 0)])
    pending, start, found = PROMPT[6:], 6, list[int]()
    while len(found) < LENGTH:
        logits = runner.forward([Segment(pending, start, blocks, 1)]).logits
        start += len(pending)
        pending = [int(logits[0].argmax())]
        found += pending
    assert found == expected
