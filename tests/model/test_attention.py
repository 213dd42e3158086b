"""Paged attention against transformers' own eager attention on the same weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.attention.interface import LayerShape, PreparedAttention, Span, Variation
from engine.attention.sdpa import SdpaBackend
from engine.attention.spans import visible
from engine.model.batch import Batch
from engine.model.kv_cache import KVCache
from engine.model.llama import LlamaAttention
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.scheduling.segment import Segment, ancestors_of
from tests.support import tiny

CPU = torch.device("cpu")
BLOCK = 4
TOKENS = [(7 * i * i + 3 * i + 5) % tiny.VOCAB for i in range(40)]
FAMILIES = ["llama", "gpt_neox", "mistral", "gemma2", "gemma3", "gpt_oss"]
STRAIGHT = list(range(3, 17))
SCATTERED = [9, 2, 14, 0, 16, 4, 11, 7, 1, 13]
SCATTERED_HIGH = [block + 10 for block in SCATTERED]
TREE = [-1, 0, 0, 1, -1, 4, 2, 6]  # two roots, branches, a path of depth 4

Eager = Callable[[list[int]], Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("family")
    path = tiny.save(tiny.FAMILIES[request.param](), folder)
    return load_model(path, role="target", device="cpu")


@pytest.fixture(scope="module")
def eager(loaded: LoadedModel) -> Eager:
    """Return logits `[tokens, vocab]` of a whole sequence by transformers alone; for a plain Llama
    by engine.model.llama, which is bit-identical to it (test_llama)."""

    def logits(tokens: list[int]) -> Tensor:
        loaded.model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                out = loaded.model(input_ids=torch.tensor([tokens]), use_cache=False)
        finally:
            loaded.model.set_attn_implementation("foredraft")
        result: Tensor = out.logits[0]
        return result

    return logits


@pytest.fixture
def runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, KVCache(40, BLOCK, "cpu"), "target")


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("blocks", [STRAIGHT, SCATTERED], ids=["straight", "scattered"])
@pytest.mark.parametrize("chunk", [40, 7, 1])
def test_chunks_of_a_prompt_equal_the_whole(
    runner: ModelRunner, eager: Eager, blocks: list[int], chunk: int
) -> None:
    """Law: a row's logits do not depend on how the prompt is cut, nor on where its KV lies."""
    parts = [
        runner.forward([Segment(TOKENS[i : i + chunk], i, blocks, min(chunk, 40 - i))]).logits
        for i in range(0, 40, chunk)
    ]
    close(torch.cat(parts), eager(TOKENS))


def test_sequences_in_one_forward_do_not_see_each_other(loaded: LoadedModel, eager: Eager) -> None:
    """Law: batching changes nothing. Prefill chunks, a decode, a verification of three, and rows
    that need no logits share a forward, over consecutive and scattered blocks."""
    runner = ModelRunner(loaded, KVCache(60, BLOCK, "cpu"), "target", backend=SdpaBackend(CPU))
    texts = [TOKENS[i:] + TOKENS[:i] for i in range(5)]
    computed, lengths, kept = [0, 9, 30, 12, 0], [23, 1, 4, 3, 2], [1, 1, 4, 0, 2]
    tables = [list(range(10)), SCATTERED_HIGH, *([10 * i + j for j in range(10)] for i in (3, 4))]
    tables.append([59 - i for i in range(10)])
    for text, start, table in zip(texts, computed, tables, strict=True):
        if start:
            runner.forward([Segment(text[:start], 0, table, 0)])
    segments = [
        Segment(text[start : start + length], start, table, keep)
        for text, start, length, table, keep in zip(
            texts, computed, lengths, tables, kept, strict=True
        )
    ]
    expected = [
        eager(text[: start + length])[start + length - keep :]
        for text, start, length, keep in zip(texts, computed, lengths, kept, strict=True)
    ]
    close(runner.forward(segments).logits, torch.cat(expected))


@pytest.mark.parametrize("blocks", [STRAIGHT, SCATTERED], ids=["straight", "scattered"])
@pytest.mark.parametrize("committed", [1, 3], ids=["one committed row", "three"])
def test_each_path_of_a_tree_is_a_chain(
    runner: ModelRunner, eager: Eager, blocks: list[int], committed: int
) -> None:
    """Law: a node's logits are those of its root-to-node path run as plain text. It does not see
    siblings and cousins, and its position follows from its depth, not its index."""
    context, draft_tokens = TOKENS[:21], [(11 * i + 2) % tiny.VOCAB for i in range(len(TREE))]
    runner.forward([Segment(context[:-committed], 0, blocks, 0)])
    segment = Segment(
        context[-committed:] + draft_tokens,
        len(context) - committed,
        blocks,
        len(TREE) + 1,
        tail_parents=TREE,
    )
    found = runner.forward([segment]).logits
    close(found[0], eager(context)[-1])
    for node, above in enumerate(ancestors_of(TREE)):
        path = [draft_tokens[i] for i in [*above, node]]
        close(found[1 + node], eager(context + path)[-1])


def test_an_accepted_branch_moved_into_order_is_a_chain(runner: ModelRunner, eager: Eager) -> None:
    """Law: after `move`, the KV of an accepted branch serves the next step as if it had been
    computed in order."""
    cache, blocks = KVCache(40, BLOCK, "cpu"), SCATTERED
    runner = ModelRunner(runner.model, cache, "target")
    context, draft_tokens = TOKENS[:21], [(11 * i + 2) % tiny.VOCAB for i in range(len(TREE))]
    runner.forward([Segment(context + draft_tokens, 0, blocks, 0, tail_parents=TREE)])
    path = [0, 2, 6, 7]  # each node is the parent of the next

    def slots(indices: list[int]) -> list[int]:
        return [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in indices]

    cache.move(slots([21 + n for n in path]), slots([21 + n for n in range(len(path))]))
    text = [*context, *(draft_tokens[n] for n in path), 77]
    found = runner.forward([Segment([77], len(text) - 1, blocks, 1)]).logits
    close(found[0], eager(text)[-1])


def test_trees_and_chains_share_a_forward(loaded: LoadedModel, eager: Eager) -> None:
    """Law: the same holds with a tree, a chain given as parents, and a decode in one forward."""
    runner = ModelRunner(loaded, KVCache(60, BLOCK, "cpu"), "target", backend=SdpaBackend(CPU))
    context, other = TOKENS[:9], TOKENS[5:18]
    tables = [[3, 1, 8, 0], [20, 21, 22, 23, 24], [30, 32, 31, 33]]
    runner.forward(
        [
            Segment(context[:-1], 0, tables[0], 0),
            Segment(other[:-1], 0, tables[1], 0),
            Segment(other[:-1], 0, tables[2], 0),
        ]
    )
    found = runner.forward(
        [
            Segment([context[-1], 50, 51, 52], 8, tables[0], 4, tail_parents=[-1, -1, 1]),
            Segment([other[-1], 60, 61], 12, tables[1], 3, tail_parents=[-1, 0]),
            Segment([other[-1]], 12, tables[2], 1),
        ]
    ).logits
    paths = [context, [*context, 50], [*context, 51], [*context, 51, 52]]
    paths += [other, [*other, 60], [*other, 60, 61], other]
    close(found, torch.stack([eager(path)[-1] for path in paths]))


def test_no_sequence_reads_another_ones_slots(loaded: LoadedModel, eager: Eager) -> None:
    """Bug: a masked key with weight zero still spreads a NaN (0 x NaN), so gathering foreign slots
    let one poisoned request ruin its neighbours."""
    cache = KVCache(40, BLOCK, "cpu")
    runner = ModelRunner(loaded, cache, "target", backend=SdpaBackend(CPU))
    for keys, values in cache.planes["target"].stacks:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    runner.forward([Segment(TOKENS[:12], 0, STRAIGHT, 0), Segment(TOKENS[:3], 0, [30], 0)])
    output = runner.forward([Segment([9], 12, STRAIGHT, 1), Segment([9], 3, [30], 1)])
    assert output.logits.isfinite().all(dim=-1).tolist() == [True, True]
    close(output.logits[1], eager([*TOKENS[:3], 9])[-1])


def test_no_mask_is_built_by_transformers(loaded: LoadedModel) -> None:
    """Bug: if a mask function were registered under our name, every forward would build a 4-D mask
    over all packed rows, which is both wrong and slow."""
    seen: list[object] = []

    class Spy(PreparedAttention):
        def run(
            self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation
        ) -> Tensor:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs.get("attention_mask")),
            with_kwargs=True,
        )
        for module in loaded.model.modules()
        if (hasattr(module, "layer_idx") and hasattr(module, "is_causal"))
        or isinstance(module, LlamaAttention)
    ]
    batch = Batch.pack([Segment(TOKENS, 0, STRAIGHT, 1)], CPU)
    ModuleCall(loaded.model)(batch.input_ids, batch.position_ids, batch.keep, Spy())
    for hook in hooks:
        hook.remove()
    assert seen == [None] * len(loaded.layers)


def test_a_row_that_is_not_a_number_is_named(tiny_target: str) -> None:
    """Law: a non-finite row is detected without spoiling the others."""
    cache = KVCache(8, BLOCK, "cpu")
    runner = ModelRunner(load_model(tiny_target, role="target", device="cpu"), cache, "target")
    runner.forward([Segment([5, 6], 0, [0], 0), Segment([5, 6], 0, [1], 0)])
    cache.planes["target"].stacks[0][0][:, :, 0] = float("nan")
    output = runner.forward([Segment([7], 2, [0], 1), Segment([7], 2, [1], 1)])
    assert output.logits.isfinite().all(dim=-1).tolist() == [False, True]


def test_window_counts_positions_not_indices() -> None:
    """Law: in a tree the window counts depth: with window 3, a node of depth 2 at index 9 sees its
    parent, itself and the root's token, whatever their indices."""
    span = Span(0, 5, 5, [0, 1, 2], ancestors=[[], [0], [], [2]])  # root row 5, nodes 6..9
    rows = visible(span, 3)
    assert rows[4].nonzero()[0].tolist() == [5, 8, 9]
    assert rows[2].nonzero()[0].tolist() == [5, 6, 7]
    assert rows[0].nonzero()[0].tolist() == [3, 4, 5]


def test_no_logits_are_computed_when_none_are_asked(tiny_target: str) -> None:
    """Law: a prefill chunk in the middle of a prompt does not run the LM head."""
    loaded = load_model(tiny_target, role="target", device="cpu")
    runner = ModelRunner(loaded, KVCache(8, BLOCK, "cpu"), "target")
    assert runner.forward([Segment([5, 6, 7], 0, [0], 0)]).logits.shape == (0, tiny.VOCAB)


def test_layers_of_different_shapes_have_their_own_tensors() -> None:
    """Law: a plane groups layers by shape; each layer has its own index."""
    cache = KVCache(4, BLOCK, "cpu")
    layers = [LayerShape(0, 2, 8, 8), LayerShape(1, 1, 16, 16), LayerShape(2, 2, 8, 8)]
    plane = cache.add_plane("p", layers, torch.float32)
    assert plane.where == {0: (0, 0), 1: (1, 0), 2: (0, 1)}
    assert [keys.shape for keys, _ in plane.stacks] == [(2, 2, 16, 8), (1, 1, 16, 16)]
