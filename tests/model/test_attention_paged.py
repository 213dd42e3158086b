"""FlexAttention and the FlashInfer adapter, held to the reference backend, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.flashinfer import FlashInferBackend
from engine.attention.flex import TILE, FlexBackend, Pages, _capped, _fused, _unfused
from engine.attention.interface import AttentionBackend, LayerShape, Span, Variation, scrap_span
from engine.attention.packed_copy import PackedCopy
from engine.attention.sdpa import SdpaBackend
from engine.attention.spans import fresh_slots, visible
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit
from engine.model.attention_choice import choose_backend, without_flashinfer
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
    "flex": lambda: FlexBackend(CPU, SIZE),
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


def attend(prepared: Any, spans: list[Span], **asked: Any) -> Tensor:
    named = {"scaling": None, "window": None, "softcap": None, "sinks": None, **asked}
    found: Tensor = prepared.run(0, *rows(spans), Variation(**named))
    return found


@pytest.mark.parametrize("asked", VARIATIONS.values(), ids=VARIATIONS)
@pytest.mark.parametrize("spans", [SPANS, CHAINS, SPANS[:1]], ids=["all", "chains", "prompt"])
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_reference(name: str, spans: list[Span], asked: dict[str, Any]) -> None:
    """Law: variable query lengths, trees, shared and scattered pages, and every variation that a
    family asks for give what SDPA gives, and the same keys lie in the same slots."""
    ours, theirs = plane(), plane()
    found = attend(BACKENDS[name]().prepare(ours, spans), spans, **asked)
    expected = attend(SdpaBackend(CPU).prepare(theirs, spans), spans, **asked)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    written = [
        span.blocks[i // SIZE] * SIZE + i % SIZE
        for span in spans
        for i in range(span.start, span.end)
    ]
    for one, other in zip(ours.stacks[0], theirs.stacks[0], strict=True):
        torch.testing.assert_close(one[:, :, written], other[:, :, written])


@pytest.mark.parametrize("asked", VARIATIONS.values(), ids=VARIATIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_staged_attention_is_filled_anew(name: str, asked: dict[str, Any]) -> None:
    """Law: what was staged once serves any later spans of as many rows, from the same tensors, and
    rows that fill up a graph touch the scrap block alone."""
    backend: Any = BACKENDS[name]()
    ours, theirs = plane(), plane()
    count = 12
    staged = backend.stage(ours, count, PackedCopy(CPU))
    graph = staged.step(0)
    attend(graph, [Span(0, count, 0, [])], **asked)  # the forward before a capture
    for spans in (CHAINS, [Span(0, 1, 3, [6])], [Span(i, 1, i, [10 + i, 22]) for i in range(7)]):
        used = sum(span.length for span in spans)
        padded = [*spans, scrap_span(used, count - used, BLOCKS - 1, SIZE)]
        before = [tensor.clone() for tensor in ours.stacks[0]]
        assert staged.suits(padded)
        staged.fill(padded)
        found = attend(graph, padded, **asked)
        expected = attend(SdpaBackend(CPU).prepare(theirs, padded), padded, **asked)
        torch.testing.assert_close(found[:, :used], expected[:, :used], rtol=1e-4, atol=1e-5)
        assert found.isfinite().all()
        touched = {s for span in padded for block in span.blocks for s in _slots(block)}
        others = [s for s in range(BLOCKS * SIZE) if s not in touched]
        for tensor, kept in zip(ours.stacks[0], before, strict=True):
            assert torch.equal(tensor[:, :, others], kept[:, :, others])


def test_the_tables_of_graphs_are_planned() -> None:
    """Bug: they have a row of the pool for each row of a graph, and were in no plan."""
    for rows in (1, 24, 96):
        pages = FlexBackend(CPU, SIZE).stage_forward(plane(), rows)._pages
        found = (pages.logical.nbytes + pages.listed.nbytes) // BLOCKS
        sizes = [size for size in buckets(rows) if size < rows]
        before = sum(4 * (size + 1 + -(-size // TILE)) for size in sizes)
        assert table_bytes("target", "flex", rows=rows, k_max=8) == before + found
    shared = table_bytes("draft", "flex", rows=96, k_max=1)
    assert shared == table_bytes("target", "flex", rows=96, k_max=8)
    assert table_bytes("draft", "flex", rows=96, k_max=3) > shared
    assert table_bytes("target", "sdpa", rows=96, k_max=8) == 0


def _slots(block: int) -> range:
    return range(block * SIZE, (block + 1) * SIZE)


def test_flashinfer_plans_once_per_forward() -> None:
    """Law: layers that ask the same share a plan; the next forward plans again, on the wrapper
    that there is."""
    backend = FlashInferBackend(CPU, PagedPrefill)
    forward, cache = backend.prepare(plane(), CHAINS), backend._wrappers
    for _ in range(3):
        attend(forward, CHAINS)
    attend(forward, CHAINS, window=5)
    assert [wrapper.plans for wrapper in cache.values()] == [1, 1]
    attend(backend.prepare(plane(), CHAINS), CHAINS)
    assert [wrapper.plans for wrapper in cache.values()] == [2, 1]


def test_a_tile_lists_every_page_that_its_rows_see() -> None:
    """Law: a kernel that reads the listed pages only, each once, misses nothing; the mask says the
    rest, exactly as `visible` does."""
    pages = Pages.of(SPANS, BLOCKS, SIZE)
    for window in (None, 5):
        mask = pages.mask_mod(SIZE, window)
        zero = torch.tensor(0)
        q, kv = torch.arange(pages.num_rows)[:, None], torch.arange(BLOCKS * SIZE)[None]
        seen = mask(zero, zero, q, kv)
        for span in SPANS:
            slots = [span.blocks[i // SIZE] * SIZE + i % SIZE for i in range(span.end)]
            part = seen[span.row : span.row + span.length]
            assert torch.equal(part[:, slots], torch.from_numpy(visible(span, window)))
            assert int(part.sum()) == int(visible(span, window).sum())
        for tile in range(pages.listed.shape[2]):
            listed = pages.listed[0, 0, tile, : pages.num_listed[0, 0, tile]].tolist()
            assert len(set(listed)) == len(listed)
            part = seen[tile * TILE : (tile + 1) * TILE]
            needed = {int(slot) // SIZE for slot in part.any(0).nonzero()}
            assert needed <= set(listed)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_poisoned_neighbour_does_no_harm(name: str) -> None:
    """Bug: 0 x NaN is NaN, so a page that is shared by a tile, or left behind by another sequence,
    must not meet a visible row."""
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


def test_fresh_slots_are_those_that_nobody_has_written() -> None:
    """Law: what a new page holds beyond the span, and nothing of a page that was there before."""
    assert list(fresh_slots(Span(0, 3, 0, [2]), 4)) == [11]
    assert list(fresh_slots(Span(0, 4, 0, [2]), 4)) == []
    assert list(fresh_slots(Span(0, 1, 3, [2]), 4)) == []
    assert list(fresh_slots(Span(0, 2, 3, [2, 7]), 4)) == [29, 30, 31]


def test_the_choice_is_said_in_one_sentence() -> None:
    """Law: `auto` on a CPU is SDPA; FlashInfer is refused with the reason."""

    def choose(name: Any, dtype: torch.dtype = torch.bfloat16) -> AttentionBackend:
        return choose_backend(name, CPU, dtype=dtype, layers=LAYER, block_size=SIZE)

    assert choose("auto").name == choose("sdpa").name == "sdpa"
    assert choose("flex").name == "flex"
    with pytest.raises(ConfigError, match="'flashinfer', but the device is cpu; use 'auto'"):
        choose("flashinfer")


@pytest.mark.parametrize("k", [0, 3])
def test_an_engine_on_flex_writes_the_reference_text(
    k: int, tiny_target: str, tiny_draft: str, tiny_eos: list[int]
) -> None:
    """Law: the choice of the backend is no choice of the text."""
    config = {
        "target": {"path": tiny_target},
        "device": "cpu",
        "attention": "flex",
        "cache": {"block_size": 4, "num_blocks": 64},
        "speculation": {
            "proposer": {"path": tiny_draft},
            "controller": {"kind": "fixed", "k": k},
        },
    }
    engine = Engine(EngineConfig.model_validate(config))
    assert engine.ready.attention == "flex"
    params = [
        SamplingParams(seed=i, max_tokens=7, temperature=i / 2, ignore_eos=True) for i in range(3)
    ]
    for i, asked in enumerate(params):
        engine.add(Submit(str(i), PROMPT[: 5 + i], asked, 0.0))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().items:
            found.setdefault(output.id, []).extend(output.tokens)
    reference = Reference(tiny_target, tiny_eos)
    for i, asked in enumerate(params):
        assert found[str(i)] == reference.generate(PROMPT[: 5 + i], asked)[0]


def test_flashinfer_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: on CUDA, what its kernels cannot do is said before it is asked to."""
    cuda, wide = torch.device("cuda"), [LayerShape(0, 2, 128, 128)]
    monkeypatch.setattr("engine.model.attention_choice.find_spec", lambda name: None)
    assert "not installed" in str(without_flashinfer(cuda, torch.bfloat16, wide))
    monkeypatch.setattr("engine.model.attention_choice.find_spec", lambda name: object())
    assert without_flashinfer(cuda, torch.bfloat16, wide) is None
    assert "heads of 64" in str(without_flashinfer(cuda, torch.bfloat16, LAYER))
    assert "float16 and bfloat16" in str(without_flashinfer(cuda, torch.float32, wide))


def test_narrow_heads_are_not_for_flex_attention_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: its kernels multiply matrices of at least 16 columns; heads of 12 died in the compiler
    at the first forward, with `auto` too."""
    cuda = torch.device("cuda")

    def chosen(name: Any, dim: int) -> str:
        layers = [LayerShape(0, 2, dim, dim)]
        return choose_backend(name, cuda, dtype=torch.float32, layers=layers, block_size=16).name

    monkeypatch.setattr("engine.attention.flex._fused", lambda: None)
    monkeypatch.setattr("engine.model.attention_choice.find_spec", lambda name: None)
    assert [chosen("auto", dim) for dim in (12, 16)] == ["sdpa", "flex"]
    with pytest.raises(ConfigError, match="heads of 16 and more, and the model's are 12"):
        chosen("flex", 12)


def test_a_soft_cap_is_a_constant_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with sizes that change torch makes an input of a Python number, too, which FlexAttention
    does not compile: no Gemma 2 started on CUDA. Law: another cap is another version."""
    settings: Any = torch._dynamo.config
    monkeypatch.setattr(settings, "specialize_float", False)
    monkeypatch.setattr(settings, "recompile_limit", settings.recompile_limit)
    given: list[tuple[Any, ...]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            given.append(inputs)
            return graph(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    run, made = _fused(), rows(CHAINS)
    for cap in (2.0, 3.0):
        asked = {"score_mod": _capped(cap), "enable_gqa": True}
        torch.testing.assert_close(run(*made, **asked), _unfused(*made, **asked))
    assert len(given) == 2
    tensors = [each for inputs in given for each in inputs if isinstance(each, Tensor)]
    assert all(each.dim() for each in tensors if each.is_floating_point())
