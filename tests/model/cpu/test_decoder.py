"""The compiled decoder computes what the model computes, bit-identical in any batch, and is not
offered for models where it would not."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.cpu.decoder import MOST_ROWS, CompiledDecoder, compiled_decoder
from engine.cpu.kernels_products import product
from engine.cpu.vectors import PANEL
from engine.cpu.weights import is_exact, pack, padded
from engine.messages import SamplingParams
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.model.loader import load_model
from engine.model.runner import ModelOutput, ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor
from engine.scheduling.segment import Segment
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.draft_model import DraftModelProposer
from tests.support import tiny

BLOCK_SIZE = 4
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied, every head its own": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "padded panels": {"hidden_size": 52, "intermediate_size": 78, "vocab_size": 130},
    "scaled rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
    "full panels": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
}


def load(
    folder: Path, *, role: Literal["target", "draft"] = "draft", exact: bool = True, **shape: Any
) -> LoadedModel:
    """Load a random Llama; `exact` rounds its weights to bfloat16, as published ones are."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, "head_dim": 16, **shape}))
    if exact:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
    return load_model(tiny.save(model, folder), role=role, device="cpu")


def compiled_of(loaded: LoadedModel) -> CompiledDecoder:
    assert loaded.compiled is not None
    return loaded.compiled


def runners(loaded: LoadedModel) -> tuple[ModelRunner, ModelRunner, KVCache]:
    """Return runners of one model with and without compiled code, a plane each, and the cache."""
    cache = KVCache(64, BLOCK_SIZE, "cpu")
    with_it = ModelRunner(loaded, cache, "compiled")
    without = ModelRunner(loaded, cache, "plain")
    without._compiled = None
    return with_it, without, cache


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("outputs", [1, PANEL, PANEL + 7, 3 * PANEL])
def test_a_product_is_right_and_alone_in_its_row(rows: int, outputs: int) -> None:
    """Law: x W' is right for any size; a row has the same bits alone and among others; columns
    beyond the outputs are zero."""
    generator = torch.Generator().manual_seed(rows * outputs)
    weight = torch.randn(outputs, 38, generator=generator).to(torch.bfloat16).float()
    x = torch.randn(rows, 38, generator=generator).numpy()
    found = np.full((rows, padded(outputs)), np.nan, np.float32)
    product(x, pack(weight), False, found)
    expected = x.astype(np.float64) @ weight.numpy().astype(np.float64).T
    np.testing.assert_allclose(found[:, :outputs], expected, rtol=1e-4, atol=1e-5)
    assert not found[:, outputs:].any()
    for row in range(rows):
        alone = np.empty((1, padded(outputs)), np.float32)
        product(x[row : row + 1], pack(weight), False, alone)
        assert alone[0].tobytes() == found[row].tobytes()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_equals_the_model(shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: logits equal the model's up to the last bits, for chunks, single rows and several
    sequences over scattered blocks, and only the requested rows are returned."""
    loaded = load(tmp_path, **shape)
    with_it, without, _ = runners(loaded)
    tokens = torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    blocks, others = [7, 2, 9, 4, 11, 30, 1, 60], [20, 21, 22, 23, 24]
    forwards = [
        [Segment(tokens[:11], 0, blocks, 0)],
        [Segment(tokens[11:14], 11, blocks, 3), Segment(tokens[5:14], 0, others, 1)],
        [Segment(tokens[14:15], 14, blocks, 1), Segment(tokens[14:15], 9, others, 1)],
        [Segment(tokens[15:20], 15, blocks, 2)],
    ]
    for segments in forwards:
        found, expected = with_it.forward(segments).logits, without.forward(segments).logits
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Stepwise:
    """The same runner, but it drafts every draft token in a forward of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.seconds, self.vocab_size = 0.0, runner.vocab_size

    def forward(self, segments: list[Segment]) -> ModelOutput:
        return self._runner.forward(segments)

    def draws_chains(self, sequences: int) -> bool:
        return False

    def fits_chain(self, *_given: object) -> bool:
        return False


MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}, {"temperature": 0.0}],
    "sampled": [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.6}],
    "both": [{"temperature": 0.0}, {"temperature": 1.3}],
    "ends": [{"ignore_eos": False}, {"stop_token_ids": tuple(range(0, 128, 9))}],
    "filtered": [{"top_p": 0.9}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.1, "temperature": 2.0}],
    "penalised": [
        {"frequency_penalty": 1.0, "presence_penalty": -0.5, "temperature": 0.0},
        {"repetition_penalty": 1.7, "temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 0.8, "presence_penalty": 1.5},
    ],
    "not usual": [{"logit_bias": {3: 2.0}}, {"min_tokens": 99, "frequency_penalty": 1.0}],
    "in company": [{"temperature": 0.8}, {"frequency_penalty": 1.0}, {"min_tokens": 99}],
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_chain_is_what_its_steps_would_be(mix: list[dict[str, Any]], tmp_path: Path) -> None:
    """Law: drafting all draft tokens in one call gives the same draft tokens, and leaves the same
    state, as one forward per draft token, through acceptance, rejection and ends, for any K per
    sequence. Bug: without `draws` the one-call path was never taken, so this compared steps with
    steps."""
    loaded, rng = load(tmp_path, initializer_range=0.3), random.Random(5)
    proposers: list[DraftModelProposer] = []
    groups: list[list[Sequence]] = []
    for stepwise in (False, True):
        runner = ModelRunner(loaded, KVCache(64, BLOCK_SIZE, "cpu"), "draft")
        processor = LogitsProcessor([2, 3])
        proposers.append(
            DraftModelProposer(
                cast("ModelRunner", Stepwise(runner) if stepwise else runner),
                processor=processor,
                draws=DeviceDraws(processor, runner.vocab_size, torch.device("cpu")),
                vocab_size=runner.vocab_size,
                max_step_tokens=64,
            )
        )
        groups.append([sequence(i, fields) for i, fields in enumerate(mix)])
    for _ in range(6):
        answers = [
            proposer.propose(
                [Chunk(seq, seq.num_tokens - 1, 1, 5 - i) for i, seq in enumerate(group)]
            )
            for proposer, group in zip(proposers, groups, strict=True)
        ]
        assert [p.tokens for p in answers[0]] == [p.tokens for p in answers[1]]
        for one_call, stepwise in zip(*answers, strict=True):
            assert one_call.confidences == pytest.approx(stepwise.confidences, abs=1e-3)
            assert one_call.second_best == stepwise.second_best
        hits = [[found.hits for found in proposer.agreements] for proposer in proposers]
        assert hits[0] == hits[1]
        for one, other, proposal in zip(*groups, answers[0], strict=True):
            assert one.num_draft_computed == other.num_draft_computed
            kept = proposal.tokens[: rng.randint(0, len(proposal.tokens))]
            for seq in (one, other):
                seq.tokens += [*kept, 7 + len(kept)]
                seq.num_draft_computed = min(seq.num_draft_computed, one.num_tokens - 1)


def sequence(index: int, fields: dict[str, Any]) -> Sequence:
    settings = {"seed": index, "max_tokens": 99, "ignore_eos": True, **fields}
    prompt = [40 + index, 5, 6, 7]
    blocks = array("i", [i * 3 + index for i in range(20)])
    return Sequence(str(index), SamplingParams(**settings), prompt, len(prompt), blocks=blocks)


def test_both_ways_share_one_cache(tmp_path: Path) -> None:
    """Law: compiled and uncompiled code can alternate: they share keys and values."""
    loaded = load(tmp_path)
    with_it, without, cache = runners(loaded)
    long = [Segment([i % 128 for i in range(MOST_ROWS + 1)], 0, list(range(20)), 1)]
    with_it.forward(long)  # too many rows for compiled code
    without.forward(long)
    step = [Segment([5], MOST_ROWS + 1, list(range(20)), 1)]
    found, expected = with_it.forward(step).logits, without.forward(step).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(
        cache.planes["compiled"].stacks[0], cache.planes["plain"].stacks[0], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Law: logits of a position are bit-identical whether it runs alone, in a chunk, or among other
    sequences."""
    loaded = load(tmp_path)
    decoder, cache = compiled_of(loaded), KVCache(64, BLOCK_SIZE, "cpu")
    plane = cache.add_plane("alone", loaded.layers, loaded.dtype)
    tokens = list(range(40, 52))
    blocks, others = list(range(10)), list(range(10, 20))
    whole = decoder([Segment(tokens, 0, blocks, 12)], plane)
    for i, token in enumerate(tokens):
        segments = [Segment([token], i, others, 1)]
        if i % 2:
            segments.insert(0, Segment([7, 8, 9], 0, list(range(20, 30)), 0))
        assert torch.equal(decoder(segments, plane)[0], whole[i])


def test_large_batches_are_not_compiled(tmp_path: Path) -> None:
    """Law: in float32, compiled code runs at most `MOST_ROWS` rows, tree nodes included."""
    decoder = compiled_of(load(tmp_path))
    blocks = list(range(40))
    assert decoder.suits([Segment([1, 2, 3], 0, blocks, 3, [-1, 0])])
    assert decoder.suits([Segment([1, 2, 3], 0, blocks, 3, [-1, -1])])
    assert decoder.suits([Segment([1], 0, blocks, 1)] * MOST_ROWS)
    assert not decoder.suits([Segment([1], 0, blocks, 1)] * (MOST_ROWS + 1))


@pytest.mark.parametrize(
    "shape",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 1 << 18},
        {"head_dim": 12},
        {"intermediate_size": 77},
    ],
    ids=["bias", "gelu", "too long", "heads of no whole vectors", "inputs of no pairs"],
)
def test_unsupported_models_are_not_compiled(shape: dict[str, Any], tmp_path: Path) -> None:
    """Law: no unsupported feature is silently dropped; such drafts run uncompiled."""
    assert load(tmp_path, **shape).compiled is None


def test_weights_that_bfloat16_would_change_are_not_compiled(tmp_path: Path) -> None:
    """Law: weights are packed only where packing loses nothing."""
    loaded = load(tmp_path, exact=False)
    assert not all(map(is_exact, loaded.model.parameters()))
    assert loaded.compiled is None


def test_a_target_is_not_compiled(tmp_path: Path) -> None:
    """Law: a target's logits come from transformers' own operations."""
    loaded = load(tmp_path, role="target")
    assert loaded.compiled is None
    assert compiled_decoder(loaded.model, positions=256) is not None


def test_it_passes_the_proof_or_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a compiled decoder whose output differs from that of transformers is not used."""
    from engine.cpu import decoder as compiled
    from engine.cpu.fused import angle_table as genuine

    monkeypatch.setattr(compiled, "angle_table", lambda *given: genuine(*given)[::-1])
    assert load(tmp_path).compiled is None
