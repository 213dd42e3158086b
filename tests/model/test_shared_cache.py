"""Engines that share one KV cache, each with its own blocks, as the arms of `bench` do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, ScheduleConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.model.kv_cache import KVCache
from engine.model.pair import Pair, load_pair, memory_plan, shared_cache
from tests.support.audit import audit

SIZE, EACH, RUN = 4, 40, 5  # tokens per block; blocks per engine; blocks per contiguous run
PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]
SAMPLED = {"greedy": 0.0, "plain": 1.0, "hot": 2.0}


def config_of(target: str, draft: str, controller: dict[str, object], blocks: int) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"path": target},
            "device": "cpu",
            "speculation": {"proposer": {"path": draft}, "controller": controller},
            "cache": {"block_size": SIZE, "num_blocks": blocks},
        }
    )


@pytest.fixture(scope="module")
def plain(tiny_target: str, tiny_draft: str) -> EngineConfig:
    return config_of(tiny_target, tiny_draft, {"kind": "fixed", "k": 0}, EACH)


@pytest.fixture(scope="module")
def adaptive(tiny_target: str, tiny_draft: str) -> EngineConfig:
    """Return an adaptive configuration, whose profile at start writes to the cache."""
    return config_of(tiny_target, tiny_draft, {"kind": "adaptive", "k_max": 3}, EACH)


@pytest.fixture(scope="module")
def pair(plain: EngineConfig) -> Pair:
    return load_pair(plain)


@pytest.fixture
def parts(tiny_target: str, tiny_draft: str, pair: Pair) -> list[KVCache]:
    """Return the parts of three engines, the third of which is never built."""
    whole = shared_cache(config_of(tiny_target, tiny_draft, {"k": 1}, 3 * EACH), pair)
    blocks = range(3 * EACH)
    return [whole.part([b for b in blocks if b // RUN % 3 == turn]) for turn in range(3)]


def begin(engine: Engine, first: int) -> Engine:
    for seed, (name, temperature) in enumerate(SAMPLED.items(), first):
        params = SamplingParams(seed=seed, max_tokens=30, temperature=temperature, ignore_eos=True)
        engine.add(Submit(name, [first, *PROMPT], params, 0.0))
    return engine


def hear(engine: Engine, texts: dict[str, list[int]]) -> None:
    for item in engine.step().items:
        texts.setdefault(item.id, []).extend(item.tokens)


def alone(config: EngineConfig, pair: Pair, first: int) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    engine = begin(Engine(config, pair=pair), first)
    while engine.has_work:
        hear(engine, texts)
    return texts


def written(part: KVCache) -> list[Tensor]:
    """Return a copy of all that the part's own blocks hold."""
    slots = torch.tensor([block * SIZE + i for block in part.blocks for i in range(SIZE)])
    stacks = [stack for plane in part.planes.values() for stack in plane.stacks]
    return [tensor[:, :, slots].clone() for stack in stacks for tensor in stack]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_engines_that_share_a_cache_write_the_same_texts(
    plain: EngineConfig, adaptive: EngineConfig, pair: Pair, parts: list[KVCache]
) -> None:
    """Law: whatever another engine does with its blocks, also at start, changes no text and no
    block of this one."""
    ours = begin(Engine(plain, pair=pair, cache=parts[0]), 1)
    texts: list[dict[str, list[int]]] = [{}, {}]
    for _ in range(5):
        hear(ours, texts[0])
    before = written(parts[0])
    theirs = begin(Engine(adaptive, pair=pair, cache=parts[1]), 2)
    assert same(before, written(parts[0])), "a profile wrote into blocks of others"
    engines = [ours, theirs]
    while any(engine.has_work for engine in engines):
        for turn, engine in enumerate(engines):
            if engine.has_work:
                before = written(parts[1 - turn])
                hear(engine, texts[turn])
                assert same(before, written(parts[1 - turn]))
                audit(engine._scheduler)
    assert texts == [alone(plain, pair, 1), alone(adaptive, pair, 2)]
    assert all(tensor.any() for part in parts[:2] for tensor in written(part)[-2:])
    assert not any(tensor.any() for tensor in written(parts[2]))


def test_an_engine_tells_of_its_own_part_of_a_cache(
    plain: EngineConfig, pair: Pair, parts: list[KVCache]
) -> None:
    """Law: for the engine itself and in its reports, a part is a cache of its own size."""
    whole, part = Engine(plain, pair=pair), Engine(plain, pair=pair, cache=parts[1])
    assert part.ready.num_blocks == whole.ready.num_blocks == EACH
    assert part.ready.max_model_len == whole.ready.max_model_len == EACH * SIZE
    assert part.gauges().blocks_total == EACH
    both = [engine.ready.memory for engine in (whole, part)]
    assert both[0]["KV of the target"] == both[1]["KV of the target"]
    assert parts[0].nbytes == 3 * (both[0]["KV of the target"] + both[0]["KV of the draft"])


def test_planes_that_are_there_already_count_as_loaded(
    plain: EngineConfig, pair: Pair, parts: list[KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug otherwise: the shared cache takes all memory, and the second engine finds none left."""
    Engine(plain, pair=pair, cache=parts[0])
    free = memory_plan(plain, pair).limit - parts[0].nbytes
    monkeypatch.setattr("engine.model.memory.available_bytes", lambda: free)
    assert (
        memory_plan(plain, pair, parts[1]).limit == memory_plan(plain, pair).limit + parts[0].nbytes
    )


def test_the_plan_has_room_for_a_scored_prompt(plain: EngineConfig, pair: Pair) -> None:
    """Bug: with few sequences and no draft tokens, it had room for few rows of logits, but a prompt
    with log-probabilities needs those of every row of a step."""
    few = plain.model_copy(update={"schedule": ScheduleConfig(max_sequences=1)})
    many = plain.model_copy(update={"schedule": ScheduleConfig(max_sequences=512)})
    sizes = [memory_plan(each, pair).sizes()["activations"] for each in (few, many)]
    assert sizes[0] == sizes[1]


def test_the_plan_has_room_for_a_scored_prompt_beside_draft_tokens(
    adaptive: EngineConfig, pair: Pair
) -> None:
    """Bug: it had room for the logits of a scored prompt or of all draft tokens, not of both."""
    schedules = [ScheduleConfig(max_sequences=n, max_step_tokens=2048) for n in (1, 128)]
    plans = [memory_plan(adaptive.model_copy(update={"schedule": s}), pair) for s in schedules]
    few, many = (plan.sizes()["activations"] for plan in plans)
    assert many - few == 127 * 4 * pair.target.vocab_size * (4 + 3 * 4)  # three and the next one
