"""EAGLE-3 proposals equal those of its definition, step by step, in whatever way its KV entries
were computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.model.eagle_head import WAITING
from engine.sampling.noise import key_halves
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
    """Collect every proposal from now on, with its request, text and k."""
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


def test_stored_states_keep_to_the_memory_plan(tiny_target: str, head: str) -> None:
    """Bug: a text that waits for K > 0 kept the hidden states of all prompts beside it in memory,
    since its own were views: ten times the plan."""
    schedule = {"max_step_tokens": 64, "max_sequences": 4}
    engine = Engine(config_for(tiny_target, head, 4, schedule=schedule))
    main: Any = engine._proposer._main
    engine.set_speculation("off")
    for number in range(50):
        params = SamplingParams(seed=0, max_tokens=1 if number else 60, cache_salt=str(number))
        engine.add(Submit(str(number), [number] * 60, params, 0.0))
    most, width = 0, main._head.weights["fc.weight"].shape[1] * main._head.dtype.itemsize
    while engine.has_work:
        engine.step()
        kept = [rows.untyped_storage() for state in main._states.values() for rows in state.rows]
        sizes = {each.data_ptr(): each.nbytes() for each in kept}
        most = max(most, sum(sizes.values()) // width)
    assert WAITING < most <= 4 * WAITING + 64


def test_states_that_will_wait_do_not_raise_the_limit(
    tiny_target: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the plan took them for loaded, and raised its limit by their size, so all parts together
    could exceed the memory that may be used."""
    monkeypatch.setattr("engine.model.memory.available_bytes", lambda: 1 << 40)
    memory = Engine(config_for(tiny_target, head, 4)).ready.memory
    loaded = sum(size for name, size in memory.items() if name.startswith("weights of"))
    assert memory["limit"] == (1 << 40) + loaded
    assert memory["pending hidden states"] > 0


@pytest.mark.parametrize(("depth", "short"), [(1, 256), (3, 1), (6, 256)])
def test_greedy_draft_tokens_are_those_of_the_definition(
    depth: int, short: int, tiny_target: str, model: Any, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: each tree equals, node for node, the one that the slow reference grows from the text,
    for several sequences at once, padded to one length or not, and after accepted draft tokens."""
    monkeypatch.setattr("engine.speculation.eagle._SHORT", short)
    slow = eagle.SlowHead(head, model, (0, 1))
    engine = Engine(config_for(tiny_target, head, 5, depth=depth))
    seen = watched(engine)
    run(engine, {"a": PROMPT, "b": [7, 3, 99, 12]}, max_tokens=9)
    proposed = [each for each in seen if each[3]]
    assert len(proposed) > 6
    assert all(len(own) == k for _, _, k, own in proposed)
    for _, text, k, own in proposed:
        assert paths_of(own) == slow.tree(text, k, min(depth, k))
        assert own.confidences == sorted(own.confidences, reverse=True)
    assert depth == 1 or any(own.branches for *_, own in proposed)


@pytest.mark.parametrize(
    "more",
    [
        {"schedule": {"max_step_tokens": 8, "max_sequences": 4}},
        {"cache": {"num_blocks": 24}},
    ],
    ids=["chunks", "preemption"],
)
def test_draft_tokens_do_not_depend_on_how_entries_came_about(
    more: dict[str, Any], tiny_target: str, model: Any, head: str
) -> None:
    """Law: chunked prompts, entries computed in bulk after rounds without draft tokens (with more
    positions than may stay pending), and a resumption after preemption draft the same tokens."""
    slow = eagle.SlowHead(head, model, (0, 1))
    engine = Engine(config_for(tiny_target, head, 3, depth=2, **more))
    prompts = {"a": PROMPT * 4, "b": [7, 3, 99, 12] * 9}
    engine.set_speculation("off")
    for name, prompt in prompts.items():
        params = SamplingParams(seed=1, max_tokens=20, temperature=0, ignore_eos=True)
        engine.add(Submit(name, prompt, params, 0.0))
    seen, preempted = watched(engine), 0
    for step in range(10_000):
        if not engine.has_work:
            break
        if step == 14:
            engine.set_speculation("fixed", 3)
        preempted += engine.step().metrics.preemptions
    proposed = [each for each in seen if each[3]]
    assert len(proposed) > 4
    assert (preempted > 0) == ("cache" in more)
    for _, text, k, own in proposed:
        assert paths_of(own) == slow.tree(text, k, min(2, k))


def test_a_cached_prefix_brings_its_entries(tiny_target: str, model: Any, head: str) -> None:
    """Law: draft tokens after a prompt from the prefix cache equal those after the same prompt
    computed."""
    slow = eagle.SlowHead(head, model, (0, 1))
    engine = Engine(config_for(tiny_target, head, 3, depth=2))
    prompt = PROMPT * 4
    run(engine, {"first": prompt}, max_tokens=4)
    seen = watched(engine)
    run(engine, {"again": prompt}, max_tokens=4)
    proposed = [each for each in seen if each[3]]
    assert proposed
    for _, text, k, own in proposed:
        assert paths_of(own) == slow.tree(text, k, min(2, k))


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"norm_before_residual": True, "norm_before_fc": True}, (0, 1)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 0]}, (1, 0)),
        ({"draft_vocab_size": 128, "architectures": ["LlamaForCausalLM"]}, (0, 1)),
    ],
    ids=["norms", "layers", "whole vocabulary"],
)
def test_each_field_of_the_format_counts(
    config: dict[str, Any], layers: tuple[int, ...], tiny_target: str, model: Any, tmp_path: Path
) -> None:
    """Law: draft tokens follow the definition with the fields of config.json."""
    words = model.get_output_embeddings().weight
    weights = eagle.random_head(words, layers=len(layers), own=config.get("draft_vocab_size", 96))
    if "norm_before_fc" in config:
        width = weights["fc.weight"].shape[1]
        weights["input_norm.weight"] = 1 + 0.3 * torch.sin(torch.arange(float(width)))
    if config.get("draft_vocab_size") == eagle.VOCAB:
        weights = {key: each for key, each in weights.items() if key not in ("d2t", "t2d")}
        weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach() * 1.5
    folder = eagle.save(weights, tmp_path, **config)
    slow = eagle.SlowHead(folder, model, layers)
    engine = Engine(config_for(tiny_target, folder, 4, depth=2))
    seen = watched(engine)
    run(engine, {"a": PROMPT}, max_tokens=5)
    proposed = [each for each in seen if each[3]]
    assert proposed
    for _, text, k, own in proposed:
        assert paths_of(own) == slow.tree(text, k, min(2, k))


def test_draft_tokens_share_the_noise_of_their_positions(
    tiny_target: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: at temperature 1 the head samples draft tokens with the noise that the target uses,
    keyed by target ids, so many more are accepted than with independent noise."""

    def kept(shift: int) -> float:
        def elsewhere(seeds: Any, positions: Any) -> Any:
            return key_halves(seeds, positions + shift)

        with monkeypatch.context() as patch:
            patch.setattr("engine.sampling.noise.key_halves", elsewhere)
            engine = Engine(config_for(tiny_target, head, 1))
            for number in range(24):
                params = SamplingParams(seed=number, max_tokens=16, ignore_eos=True)
                engine.add(Submit(str(number), PROMPT, params, 0.0))
            last = []
            while engine.has_work:
                last += [output for output in engine.step().items if output.finish is not None]
        return sum(o.accepted for o in last) / sum(o.proposed for o in last)

    assert kept(0) > 1.5 * kept(1000)
