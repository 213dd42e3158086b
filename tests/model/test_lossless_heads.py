"""Proposers that use the target's hidden states get those of transformers for the text, and their
trees change no reply."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import Engine
from engine.model.pair import Pair, load_pair
from engine.sampling.device_draws import DeviceDraws
from tests.model.test_lossless import (
    FIELDS,
    PROMPT,
    VARIANTS,
    Replies,
    config_for,
    hold,
    run,
    submit_all,
)
from tests.support.heads import Heads
from tests.support.reference import Reference

Expected = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def expected(tiny_target: str, tiny_eos: list[int]) -> Expected:
    reference = Reference(tiny_target, tiny_eos)
    return {name: reference.generate(PROMPT, params) for name, params in FIELDS.items()}


@pytest.fixture(scope="module")
def pair(tiny_target: str) -> Pair:
    return load_pair(config_for(tiny_target, "", "none", 0, {}))


def heads_of(expected: Expected, *, every: bool) -> Heads:
    known = {name: PROMPT + tokens for name, (tokens, _) in expected.items()}
    return Heads(known, vocab_size=128, every=every)


@pytest.mark.parametrize(("every", "on_device"), [(True, False), (False, True)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_trees_of_heads_are_lossless(
    variant: str,
    every: bool,
    on_device: bool,
    pair: Pair,
    tiny_target: str,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: texts are the same under every field, in chunks, over cached prefixes and after
    preemption, by compiled draws and by device draws. Accepted paths are never the first nodes, so
    KV must move; each hidden state that a proposer gets belongs to its position in the text."""
    if on_device:
        monkeypatch.setattr("engine.core.build_draws", DeviceDraws)
    heads = heads_of(expected, every=every)
    config = config_for(tiny_target, "", "ngram", 9, VARIANTS[variant])
    engine = Engine(config, pair=pair, proposer=heads)
    submit_all(engine, PROMPT, FIELDS)
    counts = Counter[str]()
    replies = Replies(run(engine, counts))
    hold(replies, expected)
    assert counts["preemptions"] or "preemption" not in variant
    assert engine.gauges().blocks_used == 0
    assert sum(output.accepted for output in replies.last.values()) > 60
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    whole: dict[str, torch.Tensor] = {}
    for name, (tokens, _) in expected.items():
        with torch.inference_mode():
            found = model.base_model(torch.tensor([PROMPT + tokens]))
        whole[name] = found.last_hidden_state[0]
    for own, text in heads.outcomes:
        assert own.hidden is not None
        assert (len(own.hidden) == 1) or every
        assert text == [*PROMPT, *expected[own.seq.id][0]][: len(text)]
        wanted = whole[own.seq.id][own.first : len(text)]
        torch.testing.assert_close(own.hidden, wanted, atol=2e-4, rtol=2e-4)
    if variant == "chunks of 4":
        assert any(not own.tokens for own, _ in heads.outcomes) == every
