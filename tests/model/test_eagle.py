"""EAGLE-3's proposals: the guesses are those of its definition, step by step, however its entries
came about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.speculation.proposal import Proposal
from tests.support import eagle

PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]


@pytest.fixture(scope="module")
def model(tiny_target: str) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(
        tiny_target, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def head(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    words = model.get_output_embeddings().weight
    return eagle.save(eagle.random_head(words), tmp_path_factory.mktemp("head"))


def config_for(target: str, folder: str, k: int, **more: Any) -> EngineConfig:
    proposer = {"kind": "eagle", "path": folder, "depth": more.pop("depth", 6)}
    return EngineConfig.model_validate(
        {
            "target": {"path": target},
            "device": "cpu",
            "cache": {"num_blocks": 128, "block_size": 4, **more.pop("cache", {})},
            "speculation": {
                "proposer": proposer,
                "companions": [],
                "controller": {"kind": "fixed", "k": k},
            },
            **more,
        }
    )


def watched(engine: Engine) -> list[tuple[str, list[int], int, Proposal]]:
    """Every proposal from now on, with the request, its text and k."""
    main, seen = engine._proposer._main, list[tuple[str, list[int], int, Proposal]]()
    propose = main.propose

    def watch(chunks: Any) -> list[Proposal]:
        found = propose(chunks)
        for chunk, own in zip(chunks, found, strict=True):
            if chunk.samples and chunk.k:
                seen.append((chunk.seq.id, [*chunk.seq.tokens], chunk.k, own))
        return found

    main.propose = watch  # type: ignore[method-assign]
    return seen


def run(engine: Engine, prompts: dict[str, list[int]], **fields: Any) -> dict[str, list[int]]:
    given: dict[str, Any] = {"seed": 1, "max_tokens": 14, "temperature": 0, "ignore_eos": True}
    for name, prompt in prompts.items():
        engine.add(Submit(name, prompt, SamplingParams(**(given | fields)), 0.0))
    replies = dict[str, list[int]]()
    while engine.has_work:
        for output in engine.step().items:
            replies.setdefault(output.id, []).extend(output.tokens)
    return replies


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    found = list[tuple[int, ...]]()
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_greedy_guesses_are_those_of_the_definition(
    depth: int, tiny_target: str, model: Any, head: str
) -> None:
    """Law: each tree is the one that the slow reference grows from the text, node for node, for
    several sequences at once and after accepted guesses."""
    slow = eagle.SlowHead(head, model, (0, 1))
    engine = Engine(config_for(tiny_target, head, 5, depth=depth))
    seen = watched(engine)
    run(engine, {"a": PROMPT, "b": [7, 3, 99, 12]}, max_tokens=9)
    guessed = [each for each in seen if each[3]]
    assert len(guessed) > 6
    assert all(len(own) == k for _, _, k, own in guessed)
    for _, text, k, own in guessed:
        assert paths_of(own) == slow.tree(text, k, min(depth, k))
        assert own.confidences == sorted(own.confidences, reverse=True)
    assert depth == 1 or any(not own.is_chain for *_, own in guessed)
