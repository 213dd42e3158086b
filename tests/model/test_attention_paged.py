"""The FlashInfer adapter against the reference backend, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.flashinfer import FlashInferBackend, FlashInferGraph
from engine.attention.interface import AttentionBackend, LayerShape, Span, Variation, padding_span
from engine.attention.packed_copy import PackedCopy
from engine.attention.sdpa import SdpaBackend
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit
from engine.model.attention_choice import choose_attention, flashinfer_obstacle
from engine.model.chain_graphs import KINDS, MOST_SEQUENCES
from engine.model.kv_cache import Plane
from engine.model.memory import table_bytes
from engine.scheduling.memory import buckets
from engine.scheduling.segment import ancestors_of
from tests.support.fake_flashinfer import PagedPrefill
from tests.support.reference import Reference

CPU = torch.device("cpu")
SIZE, BLOCKS, DIM = 4, 30, 8
PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42]
LAYER = [LayerShape(0, 2, DIM, DIM)]
TREE = ancestors_of([-1, 0, 0, 1, -1, 4])

# A prompt, a decode, a verification, a tree, a chunk, a tree after committed rows, a shared prefix.
SPANS = [
    Span(0, 9, 0, [3, 1, 2]),
    Span(9, 1, 6, [5, 4]),
    Span(10, 4, 5, [9, 7, 8]),
    Span(14, 7, 10, [20, 12, 25, 11, 13], TREE),
    Span(21, 5, 3, [14, 15]),
    Span(26, 8, 1, [16, 17, 18], TREE),
    Span(34, 1, 8, [3, 1, 19]),
]
CHAINS = [Span(0, 5, 2, [3, 1]), Span(5, 1, 9, [7, 8, 9]), Span(6, 3, 0, [4])]

VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "scaling": {"scaling": 0.7},
}

Make = Callable[[], AttentionBackend]
BACKENDS: dict[str, Make] = {
    "flashinfer": lambda: FlashInferBackend(CPU, PagedPrefill),
}


def plane(seed: int = 0) -> Plane:
    made = Plane(LAYER, BLOCKS, block_size=SIZE, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for pair in made.stacks:
        for tensor in pair:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def rows(spans: list[Span]) -> tuple[Tensor, Tensor, Tensor]:
    count = sum(span.length for span in spans)
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, heads, count, DIM) for heads in (4, 2, 2))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def attend(prepared: Any, spans: list[Span], **variation: Any) -> Tensor:
    named = {"scaling": None, "window": None, "softcap": None, "sinks": None, **variation}
    found: Tensor = prepared.run(0, *rows(spans), Variation(**named))
    return found


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
@pytest.mark.parametrize("spans", [SPANS, CHAINS, SPANS[:1]], ids=["all", "chains", "prompt"])
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_reference(name: str, spans: list[Span], variation: dict[str, Any]) -> None:
    """Law: variable query lengths, trees, shared and scattered pages, and every variation that a
    family needs give the output of SDPA, and the same keys land in the same slots."""
    ours, theirs = plane(), plane()
    found = attend(BACKENDS[name]().prepare(ours, spans), spans, **variation)
    expected = attend(SdpaBackend(CPU).prepare(theirs, spans), spans, **variation)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    written = [
        span.blocks[i // SIZE] * SIZE + i % SIZE
        for span in spans
        for i in range(span.start, span.end)
    ]
    for one, other in zip(ours.stacks[0], theirs.stacks[0], strict=True):
        torch.testing.assert_close(one[:, :, written], other[:, :, written])


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_staged_attention_is_filled_anew(name: str, variation: dict[str, Any]) -> None:
    """Law: an attention staged once serves any later spans with the same number of rows, from the
    same tensors; padding rows of a graph write to the padding block only."""
    backend: Any = BACKENDS[name]()
    ours, theirs = plane(), plane()
    count = 12
    staged = backend.stage(ours, count, PackedCopy(CPU))
    graph = staged.step(0)
    attend(graph, [Span(0, count, 0, [])], **variation)  # the forward before a capture
    for spans in (CHAINS, [Span(0, 1, 3, [6])], [Span(i, 1, i, [10 + i, 22]) for i in range(7)]):
        used = sum(span.length for span in spans)
        padded = [*spans, padding_span(used, count - used, BLOCKS - 1, SIZE)]
        before = [tensor.clone() for tensor in ours.stacks[0]]
        assert staged.suits(padded)
        staged.fill(padded)
        found = attend(graph, padded, **variation)
        expected = attend(SdpaBackend(CPU).prepare(theirs, padded), padded, **variation)
        torch.testing.assert_close(found[:, :used], expected[:, :used], rtol=1e-4, atol=1e-5)
        assert found.isfinite().all()
        touched = {s for span in padded for block in span.blocks for s in _slots(block)}
        others = [s for s in range(BLOCKS * SIZE) if s not in touched]
        for tensor, kept in zip(ours.stacks[0], before, strict=True):
            assert torch.equal(tensor[:, :, others], kept[:, :, others])


class Late:
    """An event that comes only when someone waits for it."""

    is_pending = False

    def record(self) -> None:
        self.is_pending = True

    def query(self) -> bool:
        return not self.is_pending

    def synchronize(self) -> None:
        self.is_pending = False


def test_a_plan_waits_until_the_device_has_read_the_last_one() -> None:
    """Bug: a wrapper of FlashInfer has one page-locked buffer for its plans. In steps that draw
    nothing (a long prompt) and in a draft's long catch-up, the host waits for no forward, and wrote
    the next plan over one that the device had yet to read."""
    read = Late()

    class Planned(PagedPrefill):
        def plan(self, *arguments: Any, **named: Any) -> None:
            assert self.plans == 0 or not read.is_pending
            super().plan(*arguments, **named)

    backend, ours = FlashInferBackend(CPU, Planned), plane()
    backend.read = read
    for _ in range(3):
        attend(backend.prepare(ours, CHAINS), CHAINS)
        assert read.is_pending
    spans = [Span(i, 1, i, [10 + i, 22]) for i in range(4)]
    staged = backend.stage(ours, len(spans), PackedCopy(CPU), 3)
    for number in range(3):
        attend(staged.step(number), spans)  # the forwards before a capture
    for _ in range(2):
        staged.fill(spans)
        assert read.is_pending


def test_the_tables_of_graphs_are_planned() -> None:
    """Bug: these tables grow with the pool, and the memory plan did not count them."""

    def held(sizes: list[int]) -> int:
        graphs = [FlashInferGraph(BACKENDS["flashinfer"](), plane(), size) for size in sizes]  # type: ignore[arg-type]
        return sum(4 * (graph._most_pages - graph.rows) // BLOCKS for graph in graphs)

    for rows in (1, 24, 96):
        found = table_bytes("target", "flashinfer", rows=rows, k_max=8)
        assert found == table_bytes("target", "triton", rows=rows, k_max=8) == held(buckets(rows))
    chains = KINDS * 3 * held(buckets(MOST_SEQUENCES))
    assert table_bytes("draft", "triton", rows=96, k_max=3) == held(buckets(96)) + chains
    assert table_bytes("target", "sdpa", rows=96, k_max=8) == 0


def _slots(block: int) -> range:
    return range(block * SIZE, (block + 1) * SIZE)


def test_flashinfer_plans_once_per_forward() -> None:
    """Law: layers with the same settings share a plan; the next forward plans again on the same
    wrapper."""
    backend = FlashInferBackend(CPU, PagedPrefill)
    forward, cache = backend.prepare(plane(), CHAINS), backend.wrappers
    for _ in range(3):
        attend(forward, CHAINS)
    attend(forward, CHAINS, window=5)
    assert [wrapper.plans for wrapper in cache.values()] == [1, 1]
    attend(backend.prepare(plane(), CHAINS), CHAINS)
    assert [wrapper.plans for wrapper in cache.values()] == [2, 1]


@pytest.mark.parametrize("name", BACKENDS)
def test_chains_and_trees_take_turns(name: str) -> None:
    """Bug: a tree after a chain was planned on the chain's wrapper, whose kernel has no masks."""
    backend, ours, theirs = BACKENDS[name](), plane(), plane()
    for spans in (CHAINS, SPANS, CHAINS):
        found = attend(backend.prepare(ours, spans), spans)
        expected = attend(SdpaBackend(CPU).prepare(theirs, spans), spans)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_poisoned_neighbour_does_no_harm(name: str) -> None:
    """Bug: 0 x NaN is NaN, so a visible row must not read a page that shares a tile, or one left
    over from another sequence."""
    ours = plane()
    for tensor in ours.stacks[0]:
        tensor.fill_(math.nan)
    spans = [Span(0, 3, 0, [3]), Span(3, 5, 0, [4, 5])]
    backend = BACKENDS[name]()
    query, key, value = rows(spans)
    key[:, :, :3], value[:, :, :3] = math.nan, math.nan
    found = backend.prepare(ours, spans).run(0, query, key, value, Variation())
    assert found[:, 3:].isfinite().all()
    assert not found[:, :3].isfinite().any()


def test_the_choice_or_its_refusal_is_one_sentence() -> None:
    """Law: `auto` on a CPU is SDPA; FlashInfer is refused in one sentence that gives the reason."""

    def choose(name: Any) -> str:
        return choose_attention(name, CPU, dtype=torch.bfloat16, layers=LAYER)

    assert choose("auto") == choose("sdpa") == "sdpa"
    with pytest.raises(ConfigError, match="'flashinfer', but the device is cpu; use 'auto'"):
        choose("flashinfer")


@pytest.mark.parametrize("k", [0, 3])
def test_an_engine_on_flashinfer_writes_the_reference_text(
    k: int, tiny_target: str, tiny_draft: str, tiny_eos: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the attention backend does not change the text."""
    made = BACKENDS["flashinfer"]
    monkeypatch.setattr("engine.model.runner.attention_backend", lambda *_, **how: made())
    config = {
        "target": {"path": tiny_target},
        "device": "cpu",
        "cache": {"block_size": 4, "num_blocks": 64},
        "speculation": {
            "proposer": {"path": tiny_draft},
            "controller": {"kind": "fixed", "k": k},
        },
    }
    engine = Engine(EngineConfig.model_validate(config))
    assert engine.ready.attention == "flashinfer"
    params = [
        SamplingParams(seed=i, max_tokens=7, temperature=i / 2, ignore_eos=True) for i in range(3)
    ]
    for i, sampling_params in enumerate(params):
        engine.add(Submit(str(i), PROMPT[: 5 + i], sampling_params, 0.0))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().items:
            found.setdefault(output.id, []).extend(output.tokens)
    reference = Reference(tiny_target, tiny_eos)
    for i, sampling_params in enumerate(params):
        assert found[str(i)] == reference.generate(PROMPT[: 5 + i], sampling_params)[0]


def test_flashinfer_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: on CUDA, unsupported settings are refused before its kernels are called."""
    cuda, wide = torch.device("cuda"), [LayerShape(0, 2, 128, 128)]
    monkeypatch.setattr("engine.model.attention_choice.find_spec", lambda name: None)
    assert "not installed" in str(flashinfer_obstacle(cuda, torch.bfloat16, wide))
    monkeypatch.setattr("engine.model.attention_choice.find_spec", lambda name: object())
    assert flashinfer_obstacle(cuda, torch.bfloat16, wide) is None
    assert "heads of 64" in str(flashinfer_obstacle(cuda, torch.bfloat16, LAYER))
    assert "float16 and bfloat16" in str(flashinfer_obstacle(cuda, torch.float32, wide))
