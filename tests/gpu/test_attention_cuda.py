"""The real FlashInfer and our kernel against SDPA on the same device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from engine.attention.interface import AttentionBackend, LayerShape, Span, Variation, padding_span
from engine.attention.packed_copy import PackedCopy
from engine.attention.sdpa import SdpaBackend
from engine.model.attention_choice import attention_backend, choose_attention
from engine.model.kv_cache import Plane
from engine.scheduling.segment import ancestors_of
from tests.support.cuda import ON_CUDA

pytestmark = ON_CUDA
SIZE, BLOCKS, DIM = 16, 60, 128
LAYER = [LayerShape(0, 2, DIM, DIM)]
TREE = ancestors_of([-1, 0, 0, 1, -1, 4])
CHAINS = [Span(0, 21, 5, [3, 1]), Span(21, 1, 40, [7, 8, 9]), Span(22, 5, 30, [4, 11, 12])]
SPANS = [  # a prompt, trees, a shared page
    Span(0, 33, 0, [3, 1, 2]),
    Span(33, 1, 22, [5, 4]),
    Span(34, 7, 40, [20, 30, 25], TREE),
    Span(41, 8, 17, [16, 17], TREE),
    Span(49, 1, 32, [3, 1, 19]),
]
PROMPTS = [Span(0, 300, 0, range(19)), Span(300, 90, 200, range(20, 39)), Span(390, 1, 9, [40])]
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}
NAMES = [
    pytest.param(
        "flashinfer",
        marks=pytest.mark.skipif(not find_spec("flashinfer"), reason="flashinfer-python is absent"),
    ),
    pytest.param(
        "triton", marks=pytest.mark.skipif(not find_spec("triton"), reason="triton is absent")
    ),
]


def backend_of(name: Any) -> AttentionBackend:
    device = torch.device("cuda")
    name = choose_attention(name, device, dtype=torch.bfloat16, layers=LAYER)
    return attention_backend(name, device)


def plane() -> Plane:
    device = torch.device("cuda")
    made = Plane(LAYER, BLOCKS, block_size=SIZE, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(0)
    for pair in made.stacks:
        for tensor in pair:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def attend(prepared: Any, spans: list[Span], **variation: Any) -> torch.Tensor:
    count, generator = sum(span.length for span in spans), torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(1, heads, count, DIM, generator=generator).cuda().bfloat16()
        for heads in (4, 2, 2)
    )
    named = {"scaling": None, "window": None, "softcap": None, "sinks": None, **variation}
    if named["sinks"] is not None:
        named["sinks"] = named["sinks"].cuda()
    with torch.inference_mode():
        found: torch.Tensor = prepared.run(0, query, key, value, Variation(**named))
    return found.float().cpu()


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
@pytest.mark.parametrize("spans", [SPANS, CHAINS, PROMPTS], ids=["trees", "chains", "prompts"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_sdpa(name: str, spans: list[Span], variation: dict[str, Any]) -> None:
    """Law: outputs agree within bfloat16 for all lengths, trees, shared pages and variations."""
    found = attend(backend_of(name).prepare(plane(), spans), spans, **variation)
    reference = SdpaBackend(torch.device("cuda"))
    expected = attend(reference.prepare(plane(), spans), spans, **variation)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", NAMES)
def test_chains_and_trees_take_turns(name: str) -> None:
    """Law: one backend serves chains, trees and prompts in any order."""
    backend, reference = backend_of(name), SdpaBackend(torch.device("cuda"))
    for spans in (CHAINS, SPANS, PROMPTS, SPANS):
        found = attend(backend.prepare(plane(), spans), spans)
        expected = attend(reference.prepare(plane(), spans), spans)
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


def test_a_batch_invariant_tree_node_has_the_bits_of_a_chain() -> None:
    """Law: as a node of a tree, decoded, or last in a chain of its path."""
    pytest.importorskip("triton", reason="needs Triton")
    backend: Any = attention_backend("triton", torch.device("cuda"), batch_invariant=True)
    made, start, blocks = plane(), 126, range(20, 29)  # nodes in two chunks of keys
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(1, heads, len(TREE), DIM, generator=generator).cuda().bfloat16()
        for heads in (4, 2, 2)
    ]

    def run(span: Span, chosen: list[int]) -> torch.Tensor:
        prepared, how = backend.prepare(made, [span]), Variation()
        with torch.inference_mode():
            found: torch.Tensor = prepared.run(0, *(t[:, :, chosen] for t in inputs), how)
        return found

    of_tree = run(Span(0, len(TREE), start, blocks, TREE), [*range(len(TREE))])
    for node, above in enumerate(TREE):
        path = [*above, node]
        verified = run(Span(0, len(path), start, blocks), path)
        decoded = run(Span(0, 1, start + len(above), blocks), [node])
        assert torch.equal(verified[:, -1], of_tree[:, node])
        assert torch.equal(decoded[:, 0], of_tree[:, node])


@pytest.mark.parametrize("name", NAMES)
def test_staged_attention_is_filled_anew(name: str) -> None:
    """Law: the same fixed tensors serve other spans after a new fill."""
    ours, sent = plane(), PackedCopy(torch.device("cuda"))
    sent.reserve(32)  # that of a graph
    staged: Any = backend_of(name).stage(ours, 32, sent)  # type: ignore[attr-defined]
    sent.build()
    graph = staged.step(0)
    attend(graph, [Span(0, 32, 0, [])])
    for spans in (CHAINS, [Span(0, 1, 20, [6, 7])]):
        used = sum(span.length for span in spans)
        padded = [*spans, padding_span(used, 32 - used, BLOCKS - 1, SIZE)]
        with torch.inference_mode():
            staged.fill(padded)
        sent.send()
        found = attend(graph, padded)
        expected = attend(SdpaBackend(torch.device("cuda")).prepare(plane(), padded), padded)
        torch.testing.assert_close(found[:, :used], expected[:, :used], rtol=3e-2, atol=3e-2)


def test_auto_takes_the_best_there_is() -> None:
    assert backend_of("auto").name == ("triton" if find_spec("triton") else "flashinfer")
